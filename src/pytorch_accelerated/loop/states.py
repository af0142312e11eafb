"""The training states of a run: found, read, loaded and written."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from pytorch_accelerated.data.ordering import LeftOut
from pytorch_accelerated.data.resuming import SavedData, differing_rows, saved_data
from pytorch_accelerated.errors import InvalidCheckpointError, explained_loading
from pytorch_accelerated.facts.optional import require
from pytorch_accelerated.facts.seeding import derived_seed
from pytorch_accelerated.loop.callback import savers_among
from pytorch_accelerated.loop.context import Context
from pytorch_accelerated.ranks.preparation import is_replicated
from pytorch_accelerated.ranks.ranks import Ranks, limit_of_waiting
from pytorch_accelerated.ranks.sharding import has_shards
from pytorch_accelerated.record.warning import warn_user
from pytorch_accelerated.states.disk import is_url, kind_of
from pytorch_accelerated.states.layout import MANIFEST_NAME
from pytorch_accelerated.states.run_folder import agree_on_resuming
from pytorch_accelerated.states.state_folder import read_state
from pytorch_accelerated.states.training_state import load_run, save_run
from pytorch_accelerated.states.verify import find_state, read_manifest, verify
from pytorch_accelerated.states.weights import check_model_finite


class States:
    """Writes, reads and loads the training states of a run. All ranks must call its methods.

    Args:
        context: of the call.

    Attributes:
        cut: the run before the end of its current epoch, if that has ended before its data. The events of its end were
            emitted, but states of the run resume within it.
    """

    def __init__(self, context: Context) -> None:
        self.cut: Context | None = None
        self.context = context
        self._read: tuple[Path, dict[str, Any], dict[str, Any]] | None = None
        self._saved_data: dict[str, SavedData] | None = None

    def contents(self) -> Context:
        """The run whose objects make up a training state."""
        if self.cut is None:
            return self.context
        earlier = {name: getattr(self.cut, name) for name in ("state", "losses", "gradient_norms", "kept")}
        return dataclasses.replace(self.context, **earlier)

    def find(self, source: str | Path | None, *, must_exist: bool = False) -> Any:
        """The training state that `source` is or holds, the same for all ranks. The first one has read it, if whole.

        Returns:
            Its folder; None without a source, or if there is none, about which a line is printed.

        Raises:
            InvalidCheckpointError: if there is none although it `must_exist`.
        """
        context = self.context
        agree_on_resuming(source, context.ranks)
        if source is None:
            return None
        is_whole = is_replicated(context.accelerator) and not has_shards(context.model)
        check: Callable[[Path], Any] = self._remember if is_whole else verify
        if is_url(source):
            url = str(source)
            storage = require("pytorch_accelerated.extras.object_storage", needed_by="A URL in `resume_from`")
            savers = [each for each in savers_among(context.callbacks) if each.save_dir == url]
            folders = [storage.default_local_folder(url), *(each.folder for each in savers)]
            store = storage.Store(url, *(each.storage_timeout for each in savers[:1]))
            state = storage.fetch_state(store, folders[-1], context.ranks, check)
        else:
            state = context.ranks.do_on_first(lambda: find_state(source, check))
        if state is None and must_exist:
            raise InvalidCheckpointError(f"There is no training state in {source}. Check the path.")
        if state is None:
            context.print(f"No training state in {source}: starting afresh")
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

    def choose_seed(self, state: Path | None = None) -> None:
        """Fix the seed of the call; a resumed run keeps that of its training state."""
        context, given = self.context, self.context.given.seed
        seed = int(given) if given is not None else derived_seed(context.number)
        context.seed = context.ranks.from_first(seed if state is None else _seed_of(state))

    def resume_from(self, state: Path | None) -> None:
        """Note the training state that the run will be resumed from, if any."""
        self.context.resumed_from = state
        facts = {} if state is None else _facts_of(state)
        self._saved_data = None if state is None else saved_data(facts)
        with explained_loading("What the run leaves out", state):
            self.context.left_out = tuple(LeftOut(**entry) for entry in facts.get("left_out", ()))

    def saved_seed(self, role: str | None) -> int | None:
        """The seed of a loader of the run that is resumed, if there is one.

        Args:
            role: of the loader in the run.
        """
        if self._saved_data is None:
            return None
        saved = self._saved_data.get(role or "")
        return self.context.seed if saved is None else saved.seed

    def resume(self, state: Path, skipped_weights: Collection[str] = ()) -> None:
        """Load the training state that the run is resumed from, now that everything it belongs to exists."""
        context = self.context
        self.load(state, skipped_weights=skipped_weights)
        difference = _difference_by_ranks(context, state)
        rows = differing_rows(self._saved_data or {}, context.loaders, state)
        for message in [*([] if difference is None else [difference]), *rows]:
            warn_user(context.ranks, message)

    def load(self, folder: Path, *, is_at_work: bool = True, skipped_weights: Collection[str] = ()) -> dict[str, Any]:
        """Load a training state.

        Args:
            folder: the folder of the state.
            is_at_work: whether the loaders exist and move to the position of the state.
            skipped_weights: names in the model's state that the folder may lack; the live values stay.

        Returns:
            The `extra` entries of the save, and `current_epoch`.
        """
        context = self.context
        read = self.take_read(folder)
        extra = load_run(context, folder, restores_position=is_at_work, skipped_weights=skipped_weights, read=read)
        return {"current_epoch": context.history.current_epoch, **extra}

    def write(self, folder: Path, extra: dict[str, Any], background: bool) -> None:
        """Write a training state."""
        context, saves = self.context, self.context.saves
        self.check_finite()
        # A state has no place for those that have ended, but have not been read.
        context.reports.complete_records()
        saves.in_background = folder if background else saves.in_background
        writer = saves.writer if background else None
        save_run(self.contents(), folder, extra, writer, ranks_of_writer=self._ranks_of_writer)
        saves.add(folder, context.history, context.state, writer)

    def check_finite(self) -> None:
        """Reject a save of a model with non-finite weights. Each rank sees only its shard of a sharded one."""
        check_model_finite(self.context.model, self.context.ranks)

    def _ranks_of_writer(self) -> Ranks:
        """The ranks on a channel for threads that write."""
        timeout = limit_of_waiting(self.context.given.timeout)
        return Ranks(self.context.accelerator, channel="writer", timeout=timeout)


def _seed_of(folder: Path) -> int:
    """The seed of the run that was saved in `folder`. The loaders of the resumed run use it."""
    with explained_loading("The seed of the run", folder):  # something else may have written the folder
        return int(read_manifest(folder).facts["seed"])


def _facts_of(folder: Path) -> dict[str, Any]:
    """What the manifest of a state says about its run."""
    if kind_of(folder / MANIFEST_NAME) is None:  # `transformers` wrote it
        return {}
    return read_manifest(folder).facts


def _difference_by_ranks(run: Context, folder: Path) -> str | None:
    """How this run will differ from the one that saved `folder`, if it has another number of ranks."""
    ranks_before = read_manifest(folder).facts["ranks"]
    if ranks_before == run.ranks.count:
        return None
    return (
        f"The run was saved by {ranks_before} processes and resumes with {run.ranks.count}. The weights are the same, "
        "to rounding, only if nothing (dropout, augmentation) draws random numbers, and updates keep their size."
    )
