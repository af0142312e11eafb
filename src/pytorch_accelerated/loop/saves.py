"""The training states that a run writes, their folders, and what callbacks have requested."""

from __future__ import annotations

import contextlib
import dataclasses
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytorch_accelerated.errors import CheckpointError
from pytorch_accelerated.facts.run_state import RunState
from pytorch_accelerated.ranks.ranks import Ranks
from pytorch_accelerated.record.history import RunHistory
from pytorch_accelerated.record.warning import warn_user
from pytorch_accelerated.states.disk import resolved
from pytorch_accelerated.states.run_folder import FolderLock, StateFolders
from pytorch_accelerated.states.state_folder import BackgroundWriter
from pytorch_accelerated.states.verify import verify

if TYPE_CHECKING:
    from pytorch_accelerated.extras.object_storage import Uploads


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
        in_background: the last state that was given to the writer, until `finish`; the same on all ranks.
        failures: why the last save to a folder failed, by folder.
        folders: the folders that states were saved to.
        all: the states that were saved, in this order.
        saved_to: the state that was saved when the run was stopped, if any.
        uploads: what copies the states of a folder elsewhere, by folder.
        copy_to_resume: where the program that restarts this run keeps the state for that; None: nothing restarts it.
    """

    def __init__(self, ranks: Ranks) -> None:
        self.writer = BackgroundWriter()
        self.in_background: Path | None = None
        self.failures: dict[Path, CheckpointError] = {}
        self._saved_in: set[Path] = set()
        self.folders = StateFolders()
        self.all: list[SavedState] = []
        self.saved_to: Path | None = None
        self.uploads: dict[Path, Uploads] = {}
        self.copy_to_resume: Path | None = None
        self._ranks = ranks
        self._locks: dict[Path, FolderLock] = {}

    @contextlib.contextmanager
    def attempt(self, path: str | Path) -> Iterator[None]:
        """Context for a save, which fails on all ranks or on none.

        A failure is a warning, and an error at the end of the run unless a later save to the same folder succeeds.
        Before the first one there it is an error at once.
        """
        folder = resolved(path).parent
        try:
            yield
        except CheckpointError as error:
            if folder not in self._saved_in:
                raise
            self.failures[folder] = error
            warn_user(self._ranks, f"{error} The run continues, and the next save tries again.")
        else:
            if path != self.in_background:  # else it is too early to say
                self._saved_in.add(folder)
                self.failures.pop(folder, None)

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
        if resolved(folder).parent not in self.uploads:  # else all machines can reach the copies
            self.folders.add_saved(folder, self._ranks, writer)
        epoch = run_state.epoch_of_progress(history.current_epoch)
        self.all.append(SavedState(folder, epoch, history.updates_done, time.time()))
        if writer is None:
            for call in self.writer.after_each:
                call()

    def finish(self) -> None:
        """Wait for the state that is written in the background, see `attempt`. Must be called by all ranks."""
        path, self.in_background = self.in_background, None
        if path is not None:
            with self.attempt(path):
                self._ranks.do_on_all(self.writer.wait)

    def upload(self, uploads: Uploads) -> None:
        """Upload the states that are saved to a folder, until the run is over. Must be called by all ranks.

        Raises:
            CheckpointError: on all ranks, if the storage cannot be reached.
        """
        self.uploads[uploads.folder] = uploads
        self._ranks.do_on_first(uploads.connect)

    def end(self) -> None:
        """Wait until all states are uploaded; raise what could not be saved. Must be called by all ranks."""
        while self.uploads:
            self._ranks.do_on_first(self.uploads.popitem()[1].finish)
        for error in self.failures.values():
            raise CheckpointError(f"The run is over, but its last save has failed. {error}") from error

    def close(self) -> None:
        """Wait for background work after an exception, which an error of that work must not hide."""
        for finish in (self.writer.close, *(each.finish for each in self.uploads.values())):
            try:
                finish()
            except CheckpointError as error:
                warnings.warn(str(error), stacklevel=2)

    def newest_whole(self, before: Path | None) -> Path | None:
        """The newest undamaged state of this run: one that it has saved, or the one `before` them. For rank 0."""
        for path in [*(state.path for state in reversed(self.all)), *filter(None, [before])]:
            with contextlib.suppress(CheckpointError):
                verify(path)
                return path
        return None

    def newest(self) -> Path | None:
        """The newest state that this run has saved, or the copy from which it will be restarted."""
        return self.copy_to_resume or self.folders.newest(set(self._locks))


class Requests:
    """Keeps requests and serves them in a fixed order: first the evaluation, then the saves.

    Args:
        saves: what the run has saved.
        evaluate: evaluates within a training epoch.
        write_state: writes a training state, given a folder, further entries, and whether to write in the background.

    Attributes:
        evaluation: whether an evaluation was requested.
        states: the requested training states.
        defers_saves: whether saves must wait for a safe point: only training has moments that cannot be saved.
    """

    def __init__(
        self, saves: Saves, evaluate: Callable[[], None], write_state: Callable[[Path, dict[str, Any], bool], None]
    ) -> None:
        self.evaluation = False
        self.states: list[tuple[Path, dict[str, Any], bool]] = []
        self.defers_saves = False
        self._saves = saves
        self._evaluate = evaluate
        self._write_state = write_state

    @contextlib.contextmanager
    def deferring_saves(self) -> Iterator[None]:
        """Context in which saves wait for a safe point; the end of the outermost one is such a point."""
        before, self.defers_saves = self.defers_saves, True
        try:
            yield
        finally:
            self.defers_saves = before
        if not before:
            self.write_states()

    def act(self, state: RunState, *, repeats: bool = True) -> None:
        """Serve the requests, and if `repeats` an evaluation that a stop interrupted. Must be called by all ranks."""
        if self.evaluation or (repeats and state.is_evaluation_due):
            self.evaluation, state.is_evaluation_due = False, True
            self._evaluate()
            state.is_evaluation_due = False
        self.write_states()

    def write_states(self) -> None:
        """Write the requested states."""
        while self.states:
            self._saves.finish()
            folder, extra, background = self.states.pop(0)
            with self._saves.attempt(folder):
                self._write_state(folder, extra, background)

    def forget(self) -> None:
        """Forget everything: the run goes back to an earlier state."""
        self.evaluation = False
        self.states.clear()
