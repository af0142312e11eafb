"""Looking at the disk without taking what cannot be read for what is not there."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from pytorch_accelerated.errors import InvalidCheckpointError

Kind = Literal["file", "folder", "other"]


def kind_of(path: Path) -> Kind | None:
    """What there is at `path`, links followed; None only if there is nothing.

    Raises:
        InvalidCheckpointError: if nobody can tell: a parent may not be searched, links go round in a circle, or the
            path can be none.
    """
    with explained_reading(path):
        try:
            mode = os.stat(path).st_mode
        except FileNotFoundError:
            return None
        except ValueError as error:  # a zero byte in it
            raise OSError(0, str(error)) from error
    return "file" if stat.S_ISREG(mode) else "folder" if stat.S_ISDIR(mode) else "other"


def resolved(path: str | os.PathLike[str]) -> Path:
    """The path without links and dots; it need not exist.

    Raises:
        InvalidCheckpointError: if links go round in a circle, or the path can be none.
    """
    try:
        return Path(path).resolve()
    except (OSError, RuntimeError, ValueError) as error:
        raise InvalidCheckpointError(f"{os.fspath(path)!r} leads nowhere ({error}). Check the path.") from error


def is_file(path: Path) -> bool:
    """Whether there is a file at `path`, links followed; an error where nobody can tell, see `kind_of`."""
    return kind_of(path) == "file"


def is_folder(path: Path) -> bool:
    """The same for folders."""
    return kind_of(path) == "folder"


def children_of(folder: Path) -> list[Path]:
    """What there is in a folder, by name.

    Raises:
        InvalidCheckpointError: if it cannot be read.
    """
    with explained_reading(folder):
        return sorted(folder.iterdir())


@contextlib.contextmanager
def explained_reading(path: Path) -> Iterator[None]:
    """Turns what the operating system says into an `InvalidCheckpointError`.

    A missing file is one, too: the caller has seen it, or has been told that it is there.
    """
    try:
        yield
    except OSError as error:
        raise InvalidCheckpointError(
            f"{path} cannot be read: {error.strerror}. Check the path, and that this user may read it and search the "
            "folders above it."
        ) from error
