"""The training states that a run writes, and their folders."""

from __future__ import annotations

import dataclasses
import time
import warnings
from pathlib import Path

from pytorch_accelerated.checkpointing.background import BackgroundWriter
from pytorch_accelerated.checkpointing.folder_lock import FolderLock
from pytorch_accelerated.checkpointing.reading import resolved
from pytorch_accelerated.checkpointing.shared_disk import StateFolders
from pytorch_accelerated.errors import CheckpointError
from pytorch_accelerated.processes.ranks import Ranks
from pytorch_accelerated.tracking.history import RunHistory
from pytorch_accelerated.training.run_state import RunState


@dataclasses.dataclass(frozen=True)
class SavedState:
    """A training state that a run has saved.

    Attributes:
        path: its folder, which may have been deleted since then.
        epoch: of the run history.
        update: of the run history.
        seconds: when it was saved, since 1970.
    """

    path: Path
    epoch: int
    update: int
    seconds: float


class Saves:
    """The files that a run is responsible for.

    Args:
        ranks: the processes.

    Attributes:
        writer: writes states in the background, on rank 0.
        uses_background: whether any state of this run is written in the background; the same on all ranks.
        folders: the folders that states were saved to.
        all: the states that were saved, in this order.
        saved_to: the state that was saved when the run was stopped, if any.
    """

    def __init__(self, ranks: Ranks) -> None:
        self.writer = BackgroundWriter()
        self.uses_background = False
        self.folders = StateFolders()
        self.all: list[SavedState] = []
        self.saved_to: Path | None = None
        self._ranks = ranks
        self._locks: dict[Path, FolderLock] = {}

    def claim_folder(self, folder: str | Path, argument: str = "save_dir") -> None:
        """Keep other runs from saving to `folder` until this run is over. Must be called by all ranks.

        Raises:
            CheckpointError: if another run saves to it.
        """
        path = resolved(folder)
        if path not in self._locks:
            lock = FolderLock(path, argument)
            self._ranks.do_on_first(lock.acquire)
            self._locks[path] = lock

    def release_folders(self) -> None:
        """Let other runs save to the claimed folders."""
        while self._locks:
            self._locks.popitem()[1].release()

    def add(
        self, folder: Path, history: RunHistory, run_state: RunState, writer: BackgroundWriter | None = None
    ) -> None:
        """Remember a state, which the `writer` may still be writing. Must be called by all ranks.

        Raises:
            CheckpointError: on all ranks, if a machine doesn't see the first state of a folder.
        """
        self.folders.add_saved(folder, self._ranks, writer)
        epoch = run_state.epoch_of_progress(history.current_epoch)
        self.all.append(SavedState(folder, epoch, history.updates_done, time.time()))

    def finish(self) -> None:
        """Wait for states that are written in the background; raise their errors. Must be called by all ranks."""
        if self.uses_background:
            self._ranks.do_on_all(self.writer.wait)

    def close(self) -> None:
        """Wait for the background writer after an exception, which must not be hidden by an error of the writer."""
        try:
            self.writer.close()
        except CheckpointError as error:
            warnings.warn(str(error), stacklevel=2)

    def newest(self) -> Path | None:
        """The newest state that this run has saved."""
        return self.folders.newest(set(self._locks))
