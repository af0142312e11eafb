"""A lock that lets only one run at a time save to a folder: two would replace and delete each other's states."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
from pathlib import Path

from pytorch_accelerated.checkpointing import disk
from pytorch_accelerated.checkpointing.publish import explained, make_folders
from pytorch_accelerated.checkpointing.reading import resolved
from pytorch_accelerated.errors import CheckpointError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

LOCK_NAME = ".lock"
_held: set[Path] = set()  # by this process; the operating system would grant it the same lock twice


class FolderLock:
    """A lock on a folder, held until `release` or the end of the process, however it ends. For one rank.

    Processes forked from this one, such as loader workers, do not hold it.

    Args:
        folder: created if needed.
        argument: the user's argument that names the folder, for messages.
    """

    def __init__(self, folder: str | Path, argument: str = "save_dir") -> None:
        self._folder = resolved(folder)
        self._argument = argument
        self._descriptor: int | None = None
        self._is_new = False

    def acquire(self) -> None:
        """Lock the folder; a `CheckpointError` if another run holds the lock, or the disk fails."""
        if self._folder in _held:
            raise self._refusal("another run of this process")
        if fcntl is None:
            return
        with explained(self._folder):
            self._is_new = not self._folder.exists()
            self._descriptor = self._locked_file()
        _held.add(self._folder)

    def release(self) -> None:
        """Unlock the folder if it is locked; delete it if `acquire` created it and it is still empty."""
        if self._descriptor is not None:
            descriptor, self._descriptor = self._descriptor, None
            try:
                # Removed while it is locked, so nobody else can have locked this file since.
                with contextlib.suppress(OSError):  # a file left behind locks nothing
                    disk.remove(self._folder / LOCK_NAME)
                    if self._is_new and not any(self._folder.iterdir()):
                        disk.remove(self._folder)
            finally:
                os.close(descriptor)
                _held.discard(self._folder)

    def _locked_file(self) -> int | None:
        path = self._folder / LOCK_NAME
        while True:
            make_folders(self._folder)
            try:
                descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
            except FileNotFoundError:
                continue  # a run that has just ended deleted its empty folder
            try:
                # `flock` would pass the lock on to forked processes, which may live longer.
                fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                owner = os.read(descriptor, 200).decode(errors="replace").strip()
                os.close(descriptor)
                if error.errno in (errno.EACCES, errno.EAGAIN):
                    raise self._refusal(owner or "another process") from error
                return None  # a file system without locks
            if _is_still_at(path, descriptor):
                os.ftruncate(descriptor, 0)
                os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode())
                return descriptor
            os.close(descriptor)  # a run that has just ended deleted this file

    def _refusal(self, owner: str) -> CheckpointError:
        return CheckpointError(
            f"{owner} is saving to {self._folder}. Two runs in one folder would replace and delete each other's "
            f"states. Give this one another `{self._argument}`, or end the other one first."
        )


def _is_still_at(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False
