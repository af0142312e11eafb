"""All operations by which checkpoints change the disk, and looking without mistaking the unreadable for the missing.

Writers call the former as ``disk.write(...)``, so a test that replaces them here sees each one, and can fail, crash or
record at the n-th.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from io import FileIO
from pathlib import Path
from typing import Literal

from pytorch_accelerated.errors import InvalidCheckpointError

OPERATIONS = ("create_folder", "create_file", "write", "flush", "flush_folder", "move", "remove")
Kind = Literal["file", "folder", "other"]


def create_folder(path: Path) -> None:
    """Make a new folder in an existing one."""
    path.mkdir()


def create_file(path: Path) -> FileIO:
    """Open a new file for writing, unbuffered: a crash must not lose data that counts as written."""
    return open(path, "xb", buffering=0)


def write(file: FileIO, data: bytes | memoryview) -> None:
    """Write all of `data`."""
    rest = memoryview(data)
    while rest:
        rest = rest[file.write(rest) :]


def flush(file: FileIO) -> None:
    """Wait until the content of `file` would survive a power cut."""
    os.fsync(file.fileno())


def flush_folder(path: Path) -> None:
    """Wait until the names in the folder `path` would survive a power cut."""
    if os.name != "posix":
        return  # Windows has no such operation
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # unsupported by some network file systems
            raise
    finally:
        os.close(descriptor)


def move(source: Path, target: Path) -> None:
    """Rename a file or a folder atomically; an existing file `target` is replaced."""
    os.replace(source, target)


def remove(path: Path) -> None:
    """Delete a file, a link or an empty folder."""
    if path.is_dir() and not path.is_symlink():
        path.rmdir()
    else:
        path.unlink()


def kind_of(path: Path) -> Kind | None:
    """The kind of what is at `path`, after following links; None only if nothing exists there.

    Raises:
        InvalidCheckpointError: if that is unknown, because a parent folder may not be searched, or links form
            a loop.
    """
    with explained_reading(path):
        try:
            mode = os.stat(path).st_mode
        except FileNotFoundError:
            return None
    return "file" if stat.S_ISREG(mode) else "folder" if stat.S_ISDIR(mode) else "other"


def resolved(path: str | os.PathLike[str]) -> Path:
    """The path without links and dots; it need not exist.

    Raises:
        InvalidCheckpointError: if links form a loop.
    """
    found = Path(os.path.realpath(path))
    kind_of(found)  # `realpath` takes a loop of links as it is
    return found


def is_file(path: Path) -> bool:
    """Whether `path` is a file or a link to one; an error if that is unknown, see `kind_of`."""
    return kind_of(path) == "file"


def is_folder(path: Path) -> bool:
    """Whether `path` is a folder or a link to one; an error if that is unknown, see `kind_of`."""
    return kind_of(path) == "folder"


def children_of(folder: Path) -> list[Path]:
    """The contents of a folder, sorted by name; an `InvalidCheckpointError` if it cannot be read."""
    with explained_reading(folder):
        return [folder / name for name in sorted(os.listdir(folder))]


@contextlib.contextmanager
def explained_reading(path: Path) -> Iterator[None]:
    """Turn an error of the operating system, including a missing file, into an `InvalidCheckpointError`."""
    try:
        yield
    except FileNotFoundError as error:
        raise InvalidCheckpointError(
            f"There is no {path}. Check the path; if a run deletes its older states, let it keep more of them."
        ) from error
    except OSError as error:
        raise InvalidCheckpointError(
            f"{path} cannot be read: {error.strerror}. Check the path and the permissions of it and its parent folders."
        ) from error


def working_folder() -> str:
    """The working folder; "" if it is gone."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        return ""


def is_url(place: object) -> bool:
    """Whether `place` is the URL of a folder, rather than a path."""
    return isinstance(place, str) and "://" in place
