"""The checkpoints of the Hugging Face trainer: training states beside the files of `save_model`."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from pytorch_accelerated.errors import InvalidCheckpointError
from pytorch_accelerated.huggingface.arguments.fields import SaveStrategy
from pytorch_accelerated.huggingface.checkpoints.restoring import read_trainer_state, restore_state, take_over_foreign
from pytorch_accelerated.huggingface.checkpoints.saving import (
    BASE_KEY,
    WEIGHTS_NAME,
    StagedCheckpoint,
    fingerprint_of,
    frozen_base,
    holds_run,
    weights_in,
)
from pytorch_accelerated.huggingface.events import is_ours
from pytorch_accelerated.huggingface.trainer_utils import checkpoint_name, output_dir_of, sort_checkpoints
from pytorch_accelerated.loop.states import States
from pytorch_accelerated.record.warning import warn_user
from pytorch_accelerated.states.disk import is_file
from pytorch_accelerated.states.layout import MANIFEST_NAME
from pytorch_accelerated.states.publish import begin, cover_changes, explained, plain_files, remove_state
from pytorch_accelerated.states.state_folder import part_names, read_state, write_encoded
from pytorch_accelerated.states.training_state import TRAINING_WEIGHTS, save_run
from pytorch_accelerated.states.verify import read_manifest
from pytorch_accelerated.states.weights import check_model_finite


class CheckpointStates(States):
    """Writes, reads and loads checkpoints. All ranks must call its methods."""

    def choose_seed(self, state: Path | None = None) -> None:
        """Use the seed of the arguments, so that a second training has the same order of rows."""
        args = self.context.holder.args
        self.context.seed = args.seed if args.data_seed is None else args.data_seed

    def find(self, source: str | Path | None, *, must_exist: bool = False) -> Path | None:
        """The checkpoint itself, which the Hugging Face trainer has already found."""
        return None if source is None else Path(source)

    def resume(self, state: Path, skipped_weights: Collection[str] = ()) -> None:
        """Load the checkpoint as the Hugging Face trainer does."""
        context, face = self.context, self.context.holder
        saved = read_trainer_state(state)
        if holds_run(state):
            self.load_checkpoint(state)
            if not is_ours(face._load_from_checkpoint):  # which may load more
                face._load_from_checkpoint(str(state))
        else:
            load_weights = functools.partial(face._load_from_checkpoint, str(state))
            take_over_foreign(context.trainer, state, saved.global_step, load_weights)
        restore_state(face.state, saved, face.args, context.ranks, state)
        face._load_callback_state()
        face._load_optimizer_and_scheduler(str(state))
        if face.args.ignore_data_skip:
            context.state.samples_in_epoch = context.state.batches_in_epoch = 0
        if context.state.is_evaluation_due:
            face.control.should_save = face.args.save_strategy != SaveStrategy.NO
        context.losses.reset()  # the next log is about the steps of this call

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
                    self.context.ranks,
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

    def write_checkpoint(
        self, folder: Path, write_files: Callable[[StagedCheckpoint], None], *, only_model: bool = False
    ) -> None:
        """Write the files of `write_files`, which all ranks call, and what a resume needs besides, to a folder.

        With `only_model`, a resume gets nothing else.
        """
        context, ranks, model = self.context, self.context.ranks, self.context.holder.model
        check_model_finite(context.model, ranks)
        folder_of_all = ranks.do_on_first(lambda: begin(folder, keeps_files=True))
        staged = StagedCheckpoint(folder_of_all.staging, model, needs_both=context.mode.changes_weights)
        try:
            ranks.do_on_all(explained(folder, "writing the model")(lambda: write_files(staged)))
            if only_model:
                facts = {"updates": context.state.updates, "epochs": context.state.epochs}
                ranks.do_on_first(lambda: write_encoded(folder_of_all, facts, {}))
            else:
                frozen = frozen_base(model)
                save_run(
                    context,
                    folder_of_all,
                    {BASE_KEY: fingerprint_of(model, frozen)} if frozen else {},
                    moment=self.cut,
                    skipped_weights=frozen,
                    weights_part=ranks.do_on_first(lambda: staged.weights_part),
                    has_optimizer_file=staged.has_optimizer,
                )
        finally:  # if it is still there
            if ranks.is_first:
                folder_of_all.abort()
        context.saves.add(folder, context.history, context.state)

    def cover_changes(self, folder: Path) -> None:
        """Make what callbacks have written into a checkpoint a part of it."""
        ranks = self.context.ranks

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
        if best == folder or self.context.ranks.from_first(best.is_dir()):
            state.best_model_checkpoint = str(best)

    def delete_superfluous(self) -> None:
        """Keep only the best checkpoint at the end, if the limit is 1."""
        best, args = self.context.holder.state.best_model_checkpoint, self.context.holder.args
        if not (args.should_save and args.load_best_model_at_end and args.save_total_limit == 1 and best is not None):
            return
        for path in sort_checkpoints(output_dir_of(args)):
            if Path(path).resolve() != Path(best).resolve():
                remove_state(Path(path))
