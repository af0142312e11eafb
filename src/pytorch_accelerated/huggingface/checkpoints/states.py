"""The checkpoints of the Hugging Face trainer: training states next to the files of `save_model`, and checkpoints of
transformers, which are read file by file.
"""

from __future__ import annotations

import contextlib
import functools
import random
import shutil
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from pytorch_accelerated.errors import CheckpointError, InvalidCheckpointError
from pytorch_accelerated.facts.optional import require
from pytorch_accelerated.facts.run_state import RunPhase, RunState
from pytorch_accelerated.facts.seeding import check_generator_states, generator_states, restore_generator_states
from pytorch_accelerated.huggingface.arguments.fields import SaveStrategy
from pytorch_accelerated.huggingface.checkpoints.saving import (
    BASE_KEY,
    DEEPSPEED_NAME,
    TRAINER_STATE_NAME,
    WEIGHTS_NAME,
    StagedCheckpoint,
    find_checkpoint,
    fingerprint_of,
    frozen_base,
    holds_run,
    of_deepspeed,
    weights_in,
)
from pytorch_accelerated.huggingface.events import TrainerControl, TrainerState, is_ours
from pytorch_accelerated.huggingface.trainer_utils import checkpoint_name, output_dir_of, sort_checkpoints, warn
from pytorch_accelerated.huggingface.training_args import logger
from pytorch_accelerated.loop.states import States
from pytorch_accelerated.ranks.ranks import Ranks
from pytorch_accelerated.ranks.sharding import has_shards
from pytorch_accelerated.record.warning import warn_user
from pytorch_accelerated.states.disk import is_file, kind_of
from pytorch_accelerated.states.layout import MANIFEST_NAME
from pytorch_accelerated.states.loading import checked_states, load_states
from pytorch_accelerated.states.optimizers import OPTIMIZER_FILE as OPTIMIZER_NAME
from pytorch_accelerated.states.optimizers import without_callables
from pytorch_accelerated.states.portable import load_portable
from pytorch_accelerated.states.publish import begin, cover_changes, explained, plain_files, remove_state
from pytorch_accelerated.states.run_folder import agree_on_resuming
from pytorch_accelerated.states.state_folder import part_names, read_state, write_encoded
from pytorch_accelerated.states.training_state import TRAINING_WEIGHTS, save_run
from pytorch_accelerated.states.verify import read_manifest
from pytorch_accelerated.states.weights import check_model_finite

if TYPE_CHECKING:
    from pytorch_accelerated.huggingface.training_args import TrainingArguments

SCHEDULER_NAME = "scheduler.pt"
SCALER_NAME = "scaler.pt"
# The fields that a resumed run keeps. The others follow from its arguments, which may have changed.
_KEPT = (
    "epoch",
    "global_step",
    "num_input_tokens_seen",
    "total_flos",
    "log_history",
    "best_metric",
    "best_global_step",
    "best_model_checkpoint",
)
# The callbacks whose states find the records of a run in trackers again; they have no settings that could differ.
_RECORDS = ("ReportingCallback", "TensorBoardCallback")


class CheckpointStates(States):
    """Writes, reads and loads checkpoints. All ranks must call its methods."""

    def choose_seed(self, facts: Mapping[str, Any] | None = None) -> None:
        """Use the seed of the arguments, so that a second training has the same order of rows."""
        args = self.context.holder.args
        self.asked.seed = args.seed if args.data_seed is None else args.data_seed

    def find(self, source: str | Path | None, *, must_exist: bool = False) -> Path | None:
        """The checkpoint itself, which the Hugging Face trainer has already found."""
        return None if source is None else Path(source)

    def resume(self, state: Path, skipped_weights: Collection[str] = ()) -> None:
        """Load the checkpoint as the Hugging Face trainer does."""
        face = self.context.holder
        saved = read_trainer_state(state)
        if holds_run(state):
            self.load_checkpoint(state)
            if not is_ours(face._load_from_checkpoint):  # which may load more
                face._load_from_checkpoint(str(state))
        else:
            load_weights = functools.partial(face._load_from_checkpoint, str(state))
            self._resume_foreign(state, saved.global_step, load_weights)
        self._restore_progress(saved, state)
        face._load_callback_state()
        face._load_optimizer_and_scheduler(str(state))
        if face.args.ignore_data_skip:
            self.parts.state.samples_in_epoch = self.parts.state.batches_in_epoch = 0
        if self.parts.state.is_evaluation_due:
            face.control.should_save = face.args.save_strategy != SaveStrategy.NO
        self.parts.reports.losses.reset()  # the next log is about the steps of this call

    def _restore_progress(self, saved: TrainerState, folder: Path) -> None:
        """Restore counts, log history and best model of a checkpoint. What follows from arguments may differ."""
        state, args, ranks = self.context.holder.state, self.context.holder.args, self.parts.ranks
        for name in _KEPT:
            setattr(state, name, getattr(saved, name))
        best = state.best_model_checkpoint
        if best is not None and not ranks.from_first(Path(best).is_dir()):  # the folder may have moved
            best = state.best_model_checkpoint = str(folder.with_name(Path(best).name))
        if best is not None and not ranks.from_first(Path(best).is_dir()):
            warn_user(
                ranks,
                f"The best checkpoint so far, {best} ({state.best_metric}), no longer exists. The search for the best "
                "model restarts.",
            )
            state.best_metric = state.best_global_step = state.best_model_checkpoint = None
        if args.restore_callback_states_from_checkpoint:
            state.stateful_callbacks = saved.stateful_callbacks
        else:
            states = saved.stateful_callbacks
            state.stateful_callbacks.update({name: states[name] for name in _RECORDS if name in states})

    def _resume_foreign(self, folder: Path, updates: int, load_weights: Callable[[], None]) -> None:
        """Resume from a folder without native parts, as far as its files allow.

        The position in the data is computed from updates of this run. All files are read before anything is changed.

        Raises:
            InvalidCheckpointError: if a file holds more than tensors and plain values, or does not fit.
        """
        paths = [folder / name for name in (OPTIMIZER_NAME, SCHEDULER_NAME, SCALER_NAME)]
        optimizer, scheduler, scaler = (load_portable(path) if is_file(path) else None for path in paths)
        if optimizer is None and is_file(folder / DEEPSPEED_NAME):
            foreign = of_deepspeed(folder)
            optimizer = foreign.optimizer(self.context.holder.model, self.parts.optimizer)
            scheduler = scheduler or foreign.schedule()
        generators = read_generator_states(folder / _rng_state_name(self.parts.ranks.index, self.parts.ranks))
        states = checked_states([(self.parts.optimizer, optimizer)], source=folder / OPTIMIZER_NAME)
        states += checked_states(
            [(self.parts.scheduler, scheduler), (self.parts.accelerator.scaler, scaler)], source=folder
        )
        load_states(states, load_weights, self.parts.optimizer, source=folder)
        if generators is not None:
            restore_generator_states(generators)
        missing = [name for name, state in ((OPTIMIZER_NAME, optimizer), (SCHEDULER_NAME, scheduler)) if state is None]
        if missing:
            warn_user(
                self.parts.ranks,
                f"{folder} has no {' and no '.join(missing)}: the run resumes with the weights, but with a new "
                "optimizer state. Save without `save_only_model` to resume exactly.",
            )
        self.parts.state = self._position(updates)

    def _position(self, updates: int) -> RunState:
        """The position after this many updates of this run's size."""
        config, train = self.parts.config, self.parts.loaders.train
        per_epoch = train.num_updates
        per_update = 1 if config is None else config.train_total_batch_size or 1
        epochs, rest = divmod(updates, per_epoch) if per_epoch else (0, updates)
        if not rest and updates:
            return RunState(epochs=epochs, updates=updates, phase=RunPhase.EPOCH_CLOSED)
        return RunState(
            epochs=epochs,
            updates=updates,
            updates_in_epoch=rest,
            batches_in_epoch=train.accumulation.batches(rest),
            samples_in_epoch=rest * per_update,
        )

    def of_optimizer(self) -> dict[str, Any]:
        """The states of optimizer and schedule, by file name."""
        context = self.context
        # Each rank writes its shard of a sharded optimizer with the native state.
        optimizer, is_sharded = self.parts.optimizer, hasattr(self.parts.optimizer, "piece_of")
        is_sharded = is_sharded or has_shards(context.holder.model)
        optimizer = None if is_sharded else without_callables(optimizer.state_dict())
        scheduler = None if self.parts.scheduler is None else self.parts.scheduler.state_dict()
        states = {OPTIMIZER_NAME: optimizer, SCHEDULER_NAME: scheduler}
        return {name: dict(state) for name, state in states.items() if state is not None}

    def load_best(self, best: Path) -> None:
        """Load the weights of the best checkpoint, at the end of a training."""
        try:
            self.context.holder._load_best_model()
        except InvalidCheckpointError as error:
            reason = str(error) if best.is_dir() else "its folder is gone."
            raise InvalidCheckpointError(
                f"The run is over, but the best model, {best}, cannot be loaded: {reason} The model has the "
                "weights of the last step: write them with `trainer.save_model(...)`. The log history is in "
                "`trainer.state.log_history`."
            ) from error

    def load_checkpoint(self, folder: Path) -> None:
        """Load what `write_checkpoint` wrote."""
        model = self.context.holder.model
        frozen = frozen_base(model)
        if frozen:
            _, parts = read_state(folder, ["extra"])
            saved = parts["extra"].get(BASE_KEY)
            if saved is not None and saved != fingerprint_of(model, frozen):
                warn_user(
                    self.parts.ranks,
                    f"The frozen base of this {type(model).__name__} has other weights, or another dtype, than when "
                    f"{folder} was saved, which holds the adapter only. The run uses the base as it is now; load the "
                    "one that it began with.",
                )
        super().resume(folder, frozen)

    def take_read(self, folder: Path) -> tuple[dict[str, Any], dict[str, Any]] | None:
        """The contents of a checkpoint in which the files of a user's method hold the weights."""
        parts = part_names(read_manifest(folder))
        if "model" in parts or TRAINING_WEIGHTS in parts:
            return None
        facts, contents = read_state(folder)
        return facts, {**contents, "model": weights_in(folder, self.context.holder.model)}

    def write(self, folder: Path, extra: dict[str, Any], background: bool) -> None:
        """Write the checkpoint that callbacks requested, at a safe point, as the Hugging Face trainer does."""
        face, folder = self.context.holder, self.checkpoint_folder()
        try:
            face._save_checkpoint(face.model_wrapped, None)
        except CheckpointError:
            if face.state.best_global_step == face.state.global_step:  # the weights of that model are lost
                vars(face.state).update(self.control.training.best_before)  # type: ignore[attr-defined]
            raise
        logger.info("Saved %s", folder)
        face.callback_handler.fire("on_save", face)
        self.cover_changes(folder)

    def write_checkpoint(
        self, folder: Path, write_files: Callable[[StagedCheckpoint], None], *, only_model: bool = False
    ) -> None:
        """Write the files of `write_files`, which all ranks call, and what else a resume needs, to a folder.

        With `only_model`, a resume gets nothing else.
        """
        context, ranks, model = self.context, self.parts.ranks, self.context.holder.model
        with self.control.saves.saving(folder, is_state=True), contextlib.ExitStack() as ending:
            check_model_finite(self.parts.model, ranks)
            folder_of_all = ranks.do_on_first(lambda: begin(folder, keeps_files=True))
            if ranks.is_first:
                ending.callback(folder_of_all.abort)  # if it is still there
            staged = StagedCheckpoint(folder_of_all.staging, model, needs_both=self.parts.mode.changes_weights)
            ranks.do_on_all(explained(folder, "writing the model")(lambda: write_files(staged)))
            if only_model:
                facts = {"updates": self.parts.state.updates, "epochs": self.parts.state.epochs}
                ranks.do_on_first(lambda: write_encoded(folder_of_all, facts, {}))
                return
            frozen = frozen_base(model)
            save_run(
                context,
                folder_of_all,
                {BASE_KEY: fingerprint_of(model, frozen)} if frozen else {},
                moment=self.early_end,
                skipped_weights=frozen,
                weights_part=ranks.do_on_first(lambda: staged.weights_part),
                has_optimizer_file=staged.has_optimizer,
            )

    def cover_changes(self, folder: Path) -> None:
        """Make what callbacks have written into a checkpoint a part of it."""
        ranks = self.parts.ranks

        def cover() -> set[str] | None:
            if not is_file(folder / MANIFEST_NAME):
                return None
            parts = part_names(read_manifest(folder))
            native = {f"{part}{suffix}" for part in parts for suffix in (".json", ".safetensors")}
            lost = {"model.json", WEIGHTS_NAME}.intersection(native, cover_changes(folder))
            return native if lost else None

        def copy(staged: StagedCheckpoint) -> None:
            assert native is not None
            names = [name for name in plain_files(folder) if name == WEIGHTS_NAME or name not in native]
            for name in names if ranks.is_first else ():
                (staged.folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(folder / name, staged.folder / name)
            staged.has_optimizer = "optimizer.json" not in native

        ranks.wait()
        native = ranks.do_on_first(cover)
        if native is not None:  # the weights that the run needs were replaced
            self.write_checkpoint(folder, copy)

    def checkpoint_folder(self, step: int | None = None) -> Path:
        """The checkpoint of a step, by default the current one."""
        return output_dir_of(self.context.holder.args) / checkpoint_name(
            self.context.holder.state.global_step if step is None else step
        )

    def note_best(self, folder: Path) -> None:
        """Note the checkpoint of the best model: `folder`, which is about to be written, or an earlier one."""
        state = self.context.holder.state
        if state.best_global_step is None:
            return
        best = self.checkpoint_folder(state.best_global_step)
        if best == folder or self.parts.ranks.from_first(best.is_dir()):
            state.best_model_checkpoint = str(best)

    def delete_superfluous(self) -> None:
        """Keep only the best checkpoint at the end, if the limit is 1."""
        best, args = self.context.holder.state.best_model_checkpoint, self.context.holder.args
        if not (args.should_save and args.load_best_model_at_end and args.save_total_limit == 1 and best is not None):
            return
        for path in sort_checkpoints(output_dir_of(args)):
            if Path(path).resolve() != Path(best).resolve():
                remove_state(Path(path))


def read_trainer_state(folder: Path) -> TrainerState:
    """The state in a checkpoint."""
    return TrainerState.load_from_json(folder / TRAINER_STATE_NAME)


def agreed_checkpoint(source: Any, args: TrainingArguments, ranks: Ranks) -> Path | None:
    """The checkpoint for `resume_from_checkpoint`, the same on all ranks; None to start. All ranks must call it."""
    if source is None or source is False:
        agree_on_resuming(None, ranks)
        return None
    path, output_dir = None if source is True else Path(source), output_dir_of(args)
    agree_on_resuming(path or output_dir, ranks)
    return ranks.do_on_first(lambda: find_checkpoint(path, output_dir).absolute())


def restore_callbacks(callbacks: list[Any], states: Mapping[str, Any]) -> TrainerControl | None:
    """Replace callbacks, each class in its order, by new ones made from `states`. Returns the control among these."""
    left = {name: list(state) if isinstance(state, list) else [state] for name, state in states.items()}
    for index, callback in enumerate(callbacks):
        waiting = left.get(type(callback).__name__)
        if waiting and hasattr(callback, "from_state"):
            callbacks[index] = type(callback).from_state({"args": {}, "attributes": {}, **waiting.pop(0)})
    controls = left.pop(TrainerControl.__name__, None)
    missing = [name for name, waiting in left.items() if waiting]
    if missing:
        warn(
            f"The checkpoint has states of the callbacks {', '.join(missing)}, which this trainer does not have. They "
            "are ignored."
        )
    return TrainerControl.from_state(controls[0]) if controls else None


def generators_of_all(ranks: Ranks) -> dict[str, Any]:
    """The states of all ranks' random generators for transformers, made of plain values and tensors, by file name.

    All ranks must call it.
    """
    states = generator_states()
    algorithm, keys, *rest = states["numpy"]
    known = {"python": random.getstate(), "numpy": (algorithm, keys.tolist(), *rest), "cpu": states["torch"]}
    if "cuda" in states:  # transformers expects the state of all GPUs, or of the one that a process alone uses
        known["cuda"] = states["cuda"][torch.cuda.current_device()] if ranks.count == 1 else states["cuda"]
    return {_rng_state_name(rank, ranks): state for rank, state in enumerate(ranks.exchange(known))}


def _rng_state_name(rank: int, ranks: Ranks) -> str:
    return f"rng_state_{rank}.pth" if ranks.count > 1 else "rng_state.pth"


def read_generator_states(path: Path) -> dict[str, Any] | None:
    """Read a file of transformers or of this library for `seeding.restore_generator_states`; None without a file."""
    if kind_of(path) is None:
        return None
    module = require("pytorch_accelerated.extras.huggingface.generators", needed_by=f"{path}")
    try:
        with torch.serialization.safe_globals(module.ARRAYS):
            states: dict[str, Any] = module.native(load_portable(path))
        check_generator_states(states)
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise InvalidCheckpointError(
            f"{path} cannot be read ({type(error).__name__}: {error}). It holds the states of random generators; "
            "delete it to resume with other random numbers."
        ) from error
    return states
