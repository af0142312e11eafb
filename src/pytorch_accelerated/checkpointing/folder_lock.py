"""One run at a time saves to a folder: two would replace, and delete, each other's states."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import warnings
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
_held: set[Path] = set()  # by this process, to which the operating system would grant a lock twice


class FolderLock:
    """A claim on a folder, until `release` or the end of the process, however it ends. For one rank.

    Processes that are forked from this one, such as loader workers, do not prolong it.

    Args:
        folder: is made if needed.
        argument: what names the folder, for messages.
    """

    def __init__(self, folder: str | Path, argument: str = "save_dir") -> None:
        self._folder = resolved(folder)
        self._argument = argument
        self._descriptor: int | None = None
        self._is_new = False

    def acquire(self) -> None:
        """Claim the folder.

        Raises:
            CheckpointError: if another run has done so, or the disk refuses.
        """
        if self._folder in _held:
            raise self._refusal("another run of this process")
        if fcntl is None:
            return
        with explained(self._folder):
            self._is_new = not self._folder.exists()
            self._descriptor = self._locked_file()
        _held.add(self._folder)

    def release(self) -> None:
        """Give the folder up, if it was claimed; one that was made for that, and is empty, goes."""
        if self._descriptor is not None:
            descriptor, self._descriptor = self._descriptor, None
            try:
                # Removed while it is locked: nobody can have claimed the folder by this file since.
                with contextlib.suppress(OSError):  # a file that is left behind locks nothing
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
                continue  # a run that has just ended took its empty folder away
            try:
                # Of this kind, since others pass to forked processes, which may live on for a while.
                fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                owner = os.read(descriptor, 200).decode(errors="replace").strip()
                os.close(descriptor)
                if error.errno in (errno.EACCES, errno.EAGAIN):
                    raise self._refusal(owner or "another process") from error
                warnings.warn(
                    f"{self._folder} cannot be locked ({error.strerror}), so nothing keeps a second run from saving to "
                    "it. Make sure that there is none.",
                    stacklevel=2,
                )
                return None
            if _is_still_at(path, descriptor):
                os.ftruncate(descriptor, 0)
                os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode())
                return descriptor
            os.close(descriptor)  # of a run that has just ended, and taken its file away

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
