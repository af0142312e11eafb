"""The training states of a run: requested, written, remembered; found, read and loaded again.

A save goes through this file first. Callbacks ask for it within an event (`Requests`); at the next safe point it is
written (`States.write`). Everything that a trainer saves, in whatever form, passes one door, `Saves.saving`.
`states.training_state` says what is in a state, `states.state_folder` and `states.publish` write the files,
`states.codec` their bytes.

A resume also begins here: `States.find` looks for the newest complete state (`states.verify`) and reads it
(`states.state_folder`); when everything it belongs to exists, `States.resume` loads all of it or nothing
(`states.loading`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from pytorch_accelerated.data.ordering import LeftOut
from pytorch_accelerated.data.resuming import SavedData, differing_rows, saved_data
from pytorch_accelerated.errors import CheckpointError, ConfigurationError, InvalidCheckpointError, explained_loading
from pytorch_accelerated.facts.optional import require
from pytorch_accelerated.facts.run_state import RunState
from pytorch_accelerated.facts.seeding import derived_seed
from pytorch_accelerated.loop.callback import savers_among
from pytorch_accelerated.loop.context import Context, Control
from pytorch_accelerated.ranks.preparation import is_replicated
from pytorch_accelerated.ranks.sharding import has_shards, whole
from pytorch_accelerated.record.warning import warn_user
from pytorch_accelerated.states.disk import is_url, kind_of, resolved
from pytorch_accelerated.states.layout import MANIFEST_NAME
from pytorch_accelerated.states.loading import load_run
from pytorch_accelerated.states.portable import save_portable
from pytorch_accelerated.states.run_folder import (
    FolderLock,
    agree_on_resuming,
    are_on_several_machines,
    refuse_unshared,
)
from pytorch_accelerated.states.state_folder import BackgroundWriter, read_state
from pytorch_accelerated.states.training_state import Moment, save_run
from pytorch_accelerated.states.verify import find_state, list_states, read_manifest, verify
from pytorch_accelerated.states.weights import canonical_state_dict, check_model_finite

if TYPE_CHECKING:
    from pytorch_accelerated.extras.object_storage import Uploads


@dataclasses.dataclass(eq=False)
class Requests:
    """Keeps requests and serves them in a fixed order: first the evaluation, then the saves.

    A callback may ask for a save in the middle of an update, or before others have been told of the event. Both would
    be half a state, so a save waits until the update and the event are complete.

    Attributes:
        control: of the call: it writes the states.
        evaluate: evaluates within a training epoch.
        evaluation: whether an evaluation was requested.
        states: the requested training states.
        defers_saves: whether saves must wait for a safe point. Only training has moments that cannot be saved.
    """

    control: Control
    evaluate: Callable[[], None]
    evaluation: bool = False
    states: list[tuple[Path, dict[str, Any], bool]] = dataclasses.field(default_factory=list)
    defers_saves: bool = False

    @contextlib.contextmanager
    def deferring_saves(self) -> Iterator[None]:
        """In the block, saves wait for a safe point; the end of the outermost one is such a point."""
        before, self.defers_saves = self.defers_saves, True
        try:
            yield
        finally:
            self.defers_saves = before
        if not before:
            self.write_states()

    def serve(self, position: RunState, *, repeats: bool = True) -> None:
        """Serve the requests, and if `repeats` an evaluation that a stop interrupted. Must be called by all ranks."""
        if self.evaluation or (repeats and position.is_evaluation_due):
            self.evaluation, position.is_evaluation_due = False, True
            self.evaluate()
            position.is_evaluation_due = False
        self.write_states()

    def write_states(self) -> None:
        """Write the requested states."""
        saves = self.control.saves
        while self.states:
            # A background save ends first: its failure belongs to its own folder, not to the one that is written next.
            saves.finish()
            folder, extra, background = self.states.pop(0)
            with saves.saving(folder, goes_on=True):
                self.control.states.write(folder, extra, background)

    def forget(self) -> None:
        """Forget everything: the run goes back to an earlier state."""
        self.evaluation = False
        self.states.clear()


class States:
    """Writes, reads and loads the training states of a run. All ranks must call its methods.

    Args:
        context: what the call works with.

    Attributes:
        early_end: the moment before the end of the current epoch, if that has ended before its data. The events of its
            end were emitted, but a run that resumes continues the epoch.
    """

    def __init__(self, context: Context) -> None:
        self.early_end: Moment | None = None
        self.context, self.asked, self.parts, self.control = context, context.asked, context.parts, context.control
        self._read: tuple[Path, dict[str, Any], dict[str, Any]] | None = None
        self._facts: dict[str, Any] = {}
        self._saved_data: dict[str, SavedData] | None = None

    def find(self, source: str | Path | None, *, must_exist: bool = False) -> Any:
        """The training state that `source` is or holds, the same for all ranks.

        To check a state, every byte of it must be read. A model that isn't sharded needs all of them anyway, so the
        first rank keeps what it has read for `load`.

        Returns:
            Its folder; None without a source, or if there is none, about which a line is printed.

        Raises:
            InvalidCheckpointError: if there is none although it `must_exist`.
        """
        ranks = self.parts.ranks
        agree_on_resuming(source, ranks)
        if source is None and must_exist:
            raise ConfigurationError("`must_resume` got no `resume_from`, so there is nothing to resume.")
        if source is None:
            return None
        is_whole = is_replicated(self.parts.accelerator) and not has_shards(self.parts.model)
        # A rank of a sharded model reads only its pieces later, so nothing that is read here could be kept for it.
        check: Callable[[Path], Any] = self._remember if is_whole else verify
        if is_url(source):
            url = str(source)
            storage = require("pytorch_accelerated.extras.object_storage", needed_by="A URL in `resume_from`")
            savers = [each for each in savers_among(self.parts.callbacks) if each.save_dir == url]
            folders = [storage.default_local_folder(url), *(each.folder for each in savers)]
            store = storage.Store(url, *(each.storage_timeout for each in savers[:1]))
            state = storage.fetch_state(store, folders[-1], ranks, check)
        else:
            state = ranks.do_on_first(lambda: find_state(source, check))
        if state is None and must_exist:
            raise InvalidCheckpointError(f"There is no training state in {source}. Check the path.")
        if state is None:
            self.context.print(f"No training state in {source}: starting from scratch")
        return state

    def _remember(self, folder: Path) -> None:
        try:
            self._read = folder, *read_state(folder)
        except InvalidCheckpointError:
            verify(folder)  # names all damaged files
            raise

    def take_read(self, folder: Path) -> tuple[dict[str, Any], dict[str, Any]] | None:
        """The contents of a training state, if `find` has read it: checking it is reading it."""
        known, self._read = self._read, None
        return None if known is None or known[0] != folder else known[1:]

    def resume_from(self, state: Path | None) -> None:
        """Note the training state that the run will be resumed from, if any, what it leaves out, and its seed."""
        self.asked.resumed_from = state
        if state is not None:
            if kind_of(state / MANIFEST_NAME) is not None:  # else `transformers` wrote it
                self._facts = read_manifest(state).facts
            if self._facts and self._facts.get("lanes") != (lanes := self.asked.given.lanes):
                raise ConfigurationError(
                    f"The run that saved {state} had lanes={self._facts.get('lanes')}, and this trainer has "
                    f"lanes={lanes}, so its updates would be others. Make the trainer with the lanes of the run."
                )
            self._saved_data = saved_data(self._facts)
        with explained_loading("What the run leaves out", state):
            self.asked.left_out = tuple(LeftOut(**entry) for entry in self._facts.get("left_out", ()))
            self.asked.branch_of = tuple(self._facts.get("branch_of", ()))
        self.choose_seed(self._facts)

    def choose_seed(self, facts: Mapping[str, Any] | None = None) -> None:
        """Fix the seed of the call; a resumed run keeps the seed in the `facts` of its training state."""
        asked = self.asked
        seed = derived_seed(asked.number) if asked.given.seed is None else int(asked.given.seed)
        if facts:
            with explained_loading("The seed of the run", asked.resumed_from):  # something else may have written it
                seed = int(facts["seed"])
        asked.seed = self.parts.ranks.from_first(seed)

    def saved_seed(self, role: str | None) -> int | None:
        """The seed of a loader of the run that is resumed, if there is one.

        Args:
            role: what the loader is for in the run.
        """
        if self._saved_data is None:
            return None
        saved = self._saved_data.get(role or "")
        return self.asked.seed if saved is None else saved.seed

    def resume(self, state: Path, skipped_weights: Collection[str] = ()) -> None:
        """Load the training state that the run is resumed from, now that everything it belongs to exists."""
        ranks = self.parts.ranks
        self.load(state, skipped_weights=skipped_weights)
        before = self._facts["ranks"]
        threads = torch.get_num_threads()
        if self._facts.get("threads", threads) != threads:
            warn_user(
                ranks,
                f"The run was saved with {self._facts['threads']} threads of torch and resumes with {threads}, so sums "
                "have another order and the bits differ. Set OMP_NUM_THREADS, which torchrun sets to 1, or call "
                f"`torch.set_num_threads({self._facts['threads']})`.",
            )
        if before != ranks.count and self.asked.given.lanes is None:
            warn_user(
                ranks,
                f"The run was saved by {before} processes and resumes with {ranks.count}. The weights are the same, to "
                "rounding, only if nothing (dropout, augmentation) draws random numbers, and updates keep their size.",
            )
        for message in differing_rows(self._saved_data or {}, self.parts.loaders, state):
            warn_user(ranks, message)

    def load(
        self, folder: Path, *, restores_position: bool = True, skipped_weights: Collection[str] = ()
    ) -> dict[str, Any]:
        """Load a training state.

        Args:
            folder: the folder of the state.
            restores_position: whether the loaders exist and move to the position of the state.
            skipped_weights: names in the model's state that the folder may lack; the live values stay.

        Returns:
            The `extra` entries of the save, and `current_epoch`.
        """
        read = self.take_read(folder)
        extra = load_run(
            self.context, folder, restores_position=restores_position, skipped_weights=skipped_weights, read=read
        )
        return {"current_epoch": self.parts.history.current_epoch, **extra}

    def write(self, folder: Path, extra: dict[str, Any], background: bool) -> None:
        """Write a training state. Refuse NaN and infinite parameters: a run that resumes from them could only fail."""
        parts, saves = self.parts, self.control.saves
        with saves.saving(folder, is_state=True):
            check_model_finite(parts.model, parts.ranks)
            # Step records that have ended go to the history first: a state holds only the open one.
            parts.reports.complete_records()
            if background:
                saves.in_background = folder
            else:  # the states that the last one has made superfluous may still be on their way out
                parts.ranks.do_on_all(saves.writer.wait)
            save_run(self.context, folder, extra, saves.writer if background else None, moment=self.early_end)

    def write_file(
        self, path: str | Path, model: Any, optimizer: Any, scheduler: Any, extra: Mapping[str, Any], *, per_node: bool
    ) -> None:
        """Write a portable file, see `Trainer.save_checkpoint`: of the bare `model`, and what else is not None."""
        with self.control.saves.saving(path), self.parts.mode.evaluating():
            check_model_finite(model, self.parts.ranks)  # on every rank, so that all of them get the error
            entries: dict[str, Any] = {"model_state_dict": whole(canonical_state_dict(model))}
            if optimizer is not None:
                entries["optimizer_state_dict"] = whole(optimizer.state_dict())
            if scheduler is not None:
                entries["scheduler_state_dict"] = scheduler.state_dict()
            self.control.saves.write_portable(path, lambda: {**entries, **extra}, per_node=per_node)


@dataclasses.dataclass(frozen=True)
class SavedState:
    """A training state that a run has saved.

    Attributes:
        path: its folder, which may have been deleted since then.
        epoch, update: as the run history counts them.
        seconds: when it was saved, since 1970.
    """

    path: Path
    epoch: int
    update: int
    seconds: float


class Saves:
    """The files that a call of the trainer is responsible for, and the door through which they get to the disk.

    Args:
        context: of the call.

    Attributes:
        writer: writes states in the background, on rank 0.
        in_background: the last state that was given to the writer, until `finish`; the same on all ranks.
        failures: why the last save to a folder failed, by folder.
        all: the states that were saved, in this order.
        saved_to: the state that was saved when the run was stopped, if any.
        uploads: what copies the states of a folder elsewhere, by folder.
        is_saving: whether something is being saved.
        copy_to_resume: where the program that restarts this run keeps the state for that; None: nothing restarts it.
    """

    def __init__(self, context: Context) -> None:
        self.writer = BackgroundWriter()
        self.in_background: Path | None = None
        self.failures: dict[Path, CheckpointError] = {}
        self._saved_in: set[Path] = set()
        self._seen_in: set[Path] = set()
        self.all: list[SavedState] = []
        self.saved_to: Path | None = None
        self.uploads: dict[Path, Uploads] = {}
        self.copy_to_resume: Path | None = None
        self._context, self._ranks = context, context.parts.ranks
        self._locks: dict[Path, FolderLock] = {}
        self.is_saving = False

    @contextlib.contextmanager
    def saving(self, path: str | Path, *, is_state: bool = False, goes_on: bool = False) -> Iterator[None]:
        """Context manager for writing weights or a state: a training state, a checkpoint, a file of weights, a model.

        A save within a save is a part of it, such as the model within a checkpoint. It fails on all ranks or on none.

        Args:
            path: of the folder or the file.
            is_state: whether a run can be resumed from it, so that it is remembered.
            goes_on: whether the run continues if it fails: see `_attempt`; else the error is raised.
        """
        is_part, self.is_saving = self.is_saving, True
        try:
            # If not `is_part`, a save begins: whatever is to happen before each of them belongs here.
            with self._attempt(path) if goes_on else contextlib.nullcontext():
                yield
                if is_state:
                    self._add(Path(path))
        finally:
            self.is_saving = is_part

    def write_portable(self, path: str | Path, entries: Callable[[], dict[str, Any]], *, per_node: bool = True) -> None:
        """Write a portable file of `entries`, which are made on the ranks that write. Must be called by all ranks."""
        writes = self._ranks.is_first_of_node if per_node else self._ranks.is_first
        with self.saving(path):
            self._ranks.do_on_all(lambda: save_portable(path, entries()) if writes else None)

    @contextlib.contextmanager
    def _attempt(self, path: str | Path) -> Iterator[None]:
        """Context manager for a save that a run can continue without.

        A failure is a warning, and an error at the end of the run unless a later save to the same parent folder
        succeeds. If none has succeeded there yet, it is an error at once.
        """
        parent = resolved(path).parent
        try:
            yield
        except CheckpointError as error:
            # Where there is nothing valid to save from, no save was tried, and an earlier failure still counts.
            if parent not in self._saved_in or isinstance(error, InvalidCheckpointError):
                raise
            self.failures[parent] = error
            warn_user(self._ranks, f"{error} The run continues, and the next save tries again.")
        else:
            if path != self.in_background:  # else it is too early to say
                self._saved_in.add(parent)
                self.failures.pop(parent, None)

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

    def _add(self, folder: Path) -> None:
        """Remember a state, which may still be written in the background. Must be called by all ranks.

        On separate disks, a restart on which another machine has rank 0 would find no state. So all machines check that
        they see the first state in each folder, unless copies are uploaded, which all of them can reach.

        Raises:
            CheckpointError: on all ranks, if a machine doesn't see the first state of a folder.
        """
        parent, is_complete = resolved(folder).parent, folder != self.in_background
        if parent not in self._seen_in and parent not in self.uploads:
            if are_on_several_machines(self._ranks):
                if not is_complete:  # other machines see only what is complete
                    self._ranks.do_on_all(self.writer.wait)
                refuse_unshared(parent, self._ranks)
            self._seen_in.add(parent)
        history, position = self._context.parts.history, self._context.parts.state
        epoch = position.epoch_of_progress(history.current_epoch)
        self.all.append(SavedState(folder, epoch, history.updates_done, time.time()))
        if is_complete and self.writer.after_each:  # else they follow when it is
            self.writer.follow_up()

    def finish(self) -> None:
        """Wait for the state that is written in the background, see `saving`. Must be called by all ranks."""
        path, self.in_background = self.in_background, None
        if path is not None:
            with self._attempt(path):
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
        if self.uploads:  # what follows the last save must still find them: they delete old states themselves
            self._ranks.do_on_first(self.writer.wait)
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
        """The newest complete state in the folders of this run, or the copy from which it will be restarted."""
        states = [state for folder in {*self._seen_in, *self._locks} for state in list_states(folder)]
        return self.copy_to_resume or max(states, key=lambda state: state[1].serial, default=(None, None))[0]
