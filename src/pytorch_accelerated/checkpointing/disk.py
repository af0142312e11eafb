"""All operations by which checkpoints change the disk.

Writers call them as ``disk.write(...)``, so a test that replaces them here sees each one, and can fail, crash or record
at the n-th. Reading is not included.
"""

from __future__ import annotations

import errno
import os
from io import FileIO
from pathlib import Path

OPERATIONS = ("create_folder", "create_file", "write", "flush", "flush_folder", "move", "remove")


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
