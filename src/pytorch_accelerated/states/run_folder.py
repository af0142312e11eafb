"""The folder that a run saves to: one run at a time has it, and all machines see the same training states in it.

Two runs would replace and delete each other's states. On separate disks, a restart on which another machine has rank 0
would find no state, and start from the beginning.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import time
from pathlib import Path

from pytorch_accelerated.errors import CheckpointError, PytorchAcceleratedError
from pytorch_accelerated.ranks.ranks import Ranks
from pytorch_accelerated.states import disk
from pytorch_accelerated.states.disk import is_url, resolved
from pytorch_accelerated.states.publish import explained, make_folders
from pytorch_accelerated.states.verify import list_states, looks_like_state, read_manifest

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]


LOCK_NAME = ".lock"
# Held by this process; the operating system would grant it the same lock twice.
_held: dict[Path, FolderLock] = {}
# Network file systems may show another machine's files with a delay: NFS caches listings for up to a minute.
SECONDS_TO_APPEAR = 90.0
_SECONDS_BETWEEN_LOOKS = 0.5


class FolderLock:
    """A lock on a folder, held until `release` or the end of the process, however it ends. For one rank.

    Processes forked from this one, such as loader workers, do not hold it.

    Args:
        folder: created if needed.
        argument: the user's argument that names the folder, for messages.
        name: the file in the folder; locks of other names may be held at the same time.
    """

    def __init__(self, folder: str | Path, argument: str = "save_dir", name: str = LOCK_NAME) -> None:
        self._folder = resolved(folder)
        self._path = self._folder / name
        self._argument = argument
        self._descriptor: int | None = None

    def acquire(self) -> None:
        """Lock the folder; a `CheckpointError` if another run holds the lock, or the disk fails."""
        if self._path in _held:
            self._refuse("another run of this process")
        with explained(self._folder):
            make_folders(self._folder)
            while fcntl is not None and not self._try_to_lock():
                pass
        _held[self._path] = self

    def release(self) -> None:
        """Unlock the folder if it is locked."""
        if _held.get(self._path) is self:
            del _held[self._path]
        if self._descriptor is not None:
            # Removed while it is locked, so nobody else can have locked this file since.
            with contextlib.suppress(OSError):  # a file left behind locks nothing
                disk.remove(self._path)
            os.close(self._descriptor)
            self._descriptor = None

    def _try_to_lock(self) -> bool:
        """Lock the file. False if a run that has just ended deleted it meanwhile."""
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        try:
            # `flock` would pass the lock on to forked processes, which may live longer.
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_still_there = os.path.samestat(os.stat(self._path), os.fstat(descriptor))
        except FileNotFoundError:
            is_still_there = False
        except OSError as error:
            owner = os.read(descriptor, 200).decode(errors="replace").strip()
            os.close(descriptor)
            if error.errno in (errno.EACCES, errno.EAGAIN):
                self._refuse(owner or "another process")
            return True  # a file system without locks
        if is_still_there:
            os.ftruncate(descriptor, 0)
            os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode())
            self._descriptor = descriptor
        else:
            os.close(descriptor)
        return is_still_there

    def _refuse(self, owner: str) -> None:
        raise CheckpointError(
            f"{owner} is saving to {self._folder}. Two runs in one folder would replace and delete each other's "
            f"states. Give this one another `{self._argument}`, or end the other one first."
        )


def agree_on_resuming(place: str | Path | None, ranks: Ranks) -> None:
    """Make sure that either all ranks resume from `place`, and see the same state there, or none resumes.

    A script that resumes if it finds a state finds it on some machines only, if the disk isn't shared. Must be called
    by all ranks.

    Raises:
        CheckpointError: on all ranks, if they disagree.
    """
    given = ranks.exchange(place is not None)
    if any(given) and not all(given):
        missing = ", ".join(str(rank) for rank, is_given in enumerate(given) if not is_given)
        raise CheckpointError(
            f"Some ranks were told to resume from a training state, but rank {missing} was not. If each rank looks for "
            "a state by itself, they see different disks: save to a shared disk, and pass one path on all ranks."
        )
    if place is not None and not is_url(place):
        refuse_unshared(place, ranks)


def refuse_unshared(place: str | Path, ranks: Ranks) -> None:
    """Make sure that all machines see the same training states in `place`. Must be called by all ranks.

    Raises:
        CheckpointError: on all ranks, if the machines see different states; says what each of them sees.
    """
    if not are_on_several_machines(ranks):
        return
    deadline = time.monotonic() + SECONDS_TO_APPEAR
    looks = ranks.is_first_of_node
    while True:
        views = [view for view in ranks.exchange((socket.gethostname(), _view(place)) if looks else None) if view]
        if len({seen for _, seen in views}) <= 1:
            return
        if ranks.from_first(time.monotonic() > deadline):
            break
        time.sleep(_SECONDS_BETWEEN_LOOKS)
    told = "; ".join(f"machine {number} ({host}): {seen}" for number, (host, seen) in enumerate(views))
    raise CheckpointError(
        f"The machines of this run see different training states in {place}. {told}. Save to a shared disk, or copy "
        "the newest state to the same path on all machines before you resume."
    )


def are_on_several_machines(ranks: Ranks) -> bool:
    """Whether the ranks of a run may see different disks. Must be called by all ranks."""
    return ranks.count > 1 and ranks.any(ranks.local_index != ranks.index)


def _view(place: str | Path) -> str:
    """The newest state that this machine sees, in words."""
    try:
        folder = Path(place).resolve()
        states = [(folder, read_manifest(folder))] if looks_like_state(folder) else list_states(folder)
    except (PytorchAcceleratedError, OSError) as error:  # if all machines agree, reading the state raises it again
        return f"nothing that could be read ({error})"
    return f"newest is {states[-1][0].name}, with serial number {states[-1][1].serial}" if states else "no state"
