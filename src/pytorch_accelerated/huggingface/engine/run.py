"""A run of the Hugging Face trainer: the native run, with the seeds, states and events of that API."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytorch_accelerated.callbacks.warning import warn_user
from pytorch_accelerated.checkpointing.disk import is_file
from pytorch_accelerated.checkpointing.layout import MANIFEST_NAME
from pytorch_accelerated.checkpointing.publish import begin, cover_changes, plain_files
from pytorch_accelerated.checkpointing.state_folder import part_names, read_state, write_encoded
from pytorch_accelerated.checkpointing.training_state import TRAINING_WEIGHTS, save_run
from pytorch_accelerated.checkpointing.verify import read_manifest
from pytorch_accelerated.data.updates import Update
from pytorch_accelerated.errors import StopTrainingError
from pytorch_accelerated.huggingface.checkpoints.saving import StagedCheckpoint, weights_in
from pytorch_accelerated.huggingface.checkpoints.weights import BASE_KEY, WEIGHTS_NAME, fingerprint_of, frozen_base
from pytorch_accelerated.huggingface.engine.step import FaceStep, ZeroStep
from pytorch_accelerated.huggingface.events import Events
from pytorch_accelerated.models.deepspeed import EngineOptimizer, ZeroOptimizer
from pytorch_accelerated.steps.step import Step, StepParts
from pytorch_accelerated.tracking.loss import LossTracker
from pytorch_accelerated.training.run import Run

if TYPE_CHECKING:
    from pytorch_accelerated.huggingface.engine.training import Training
    from pytorch_accelerated.huggingface.trainer import Trainer


class EngineRun(Run):
    """What lives as long as one call of the engine.

    The loss tracker holds the losses since the last log, which may have been in an earlier epoch.

    Attributes:
        face: the trainer that users see.
        events: calls its callbacks.
        training: the current training, or the last one if this is an evaluation outside of a training.
        evaluates_as_requested: whether an evaluation is running that the loop requested.
        preparation_seconds: the time it took to prepare the model for an evaluation.
    """

    face: Trainer
    events: Events
    training: Training
    evaluates_as_requested = False
    preparation_seconds: float | None = None
    has_step_records = False  # `logging_steps` says which losses belong together

    @property
    def holder(self) -> Any:
        """The trainer that users see."""
        return self.face

    def choose_seed(self, state: Path | None = None) -> None:
        """Use the seed of the arguments, so that a second training has the same order of rows."""
        args = self.face.args
        self.seed = args.seed if args.data_seed is None else args.data_seed

    def find_state(self, source: str | Path) -> Path | None:
        """The checkpoint itself, which the Hugging Face trainer has already found."""
        return Path(source)

    def resume_from(self, state: Path | None) -> None:
        """Note the checkpoint that the run resumes from."""
        super().resume_from(state)
        self.losses = LossTracker(leaves_out_non_finite=self.face.args.logging_nan_inf_filter)

    def resume(self, state: Path, skipped_weights: Collection[str] = ()) -> None:
        """Load the checkpoint as the Hugging Face trainer does."""
        self.training.resume(state)
        self.losses.reset()  # the next log is about the steps of this call

    def load_checkpoint(self, folder: Path) -> None:
        """Load what `write_checkpoint` wrote. Must be called by all ranks."""
        model = self.face.model
        frozen = frozen_base(model)
        if frozen:
            _, parts = read_state(folder, ["extra"])
            saved = parts["extra"].get(BASE_KEY)
            if saved is not None and saved != fingerprint_of(model, frozen):
                warn_user(
                    self.ranks,
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
        return facts, {**contents, "model": weights_in(folder, self.face.model)}

    def write_checkpoint(
        self, folder: Path, write_files: Callable[[StagedCheckpoint], None], *, only_model: bool = False
    ) -> None:
        """Write the files of `write_files`, which all ranks call, and what a resume needs besides, to a folder.

        All ranks must call it. With `only_model`, a resume gets nothing else.
        """
        ranks, model, state = self.ranks, self.face.model, self.hooks.run_state
        self.check_finite()
        folder_of_all = ranks.do_on_first(lambda: begin(folder, takes_in=True))
        staged = StagedCheckpoint(folder_of_all.staging, model)
        try:
            ranks.do_on_all(lambda: write_files(staged))
            if only_model:
                facts = {"updates": state.updates, "epochs": state.epochs}
                ranks.do_on_first(lambda: write_encoded(folder_of_all, facts, {}))
            else:
                frozen = frozen_base(model)
                save_run(
                    self.contents(),
                    folder_of_all,
                    {BASE_KEY: fingerprint_of(model, frozen)} if frozen else {},
                    skipped_weights=frozen,
                    weights_part=ranks.do_on_first(lambda: staged.weights_part),
                    has_optimizer_file=staged.has_optimizer,
                )
        finally:  # if it is still there
            if ranks.is_first:
                folder_of_all.abort()
        self.saves.add(folder, self.hooks.run_history, state)

    def cover_changes(self, folder: Path) -> None:
        """Make what callbacks have written into a checkpoint a part of it. Must be called by all ranks."""

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
            for name in names if self.ranks.is_first else ():
                (staged.folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(folder / name, staged.folder / name)
            staged.has_optimizer = "optimizer.json" not in native

        self.ranks.wait()
        native = self.ranks.do_on_first(cover)
        if native is not None:  # the weights that the run needs were replaced
            self.write_checkpoint(folder, copy)

    def write_state(self, folder: Path, extra: dict[str, Any], background: bool) -> None:
        """Write the checkpoint that callbacks requested."""
        self.training.save_as_requested()

    def agrees_after_each_update(self) -> bool:
        """Whether a callback or method of the user may set flags on one rank alone."""
        return self.events.ranks_agree_after_each_update()

    def agree_on_control(self) -> None:
        """Set each flag of the control that any rank has set, where ranks may have callbacks of their own.

        Must be called by all ranks, between events and what is done because of their flags.
        """
        if self.uneven is not None and self.all_agree_after_each_update:
            self.events.agree(self.ranks)

    @property
    def is_complete(self) -> bool:
        """Whether there is nothing left to train, or a callback ended the training. Epochs that it ended count."""
        self.agree_on_control()
        state = self.hooks.run_state
        is_over = state.epochs >= self.face.state.num_train_epochs or (state.is_cut and self.updates_left == 0)
        return is_over or bool(self.face.control.should_training_stop) or super().is_complete

    @property
    def ends_before_data(self) -> bool:
        """Whether a limit or a callback ends the run within the epoch. A callback may also end the epoch itself."""
        control = self.face.control
        is_stopped = self._updates_of_epoch is None and control.should_training_stop
        return not control.should_epoch_stop and (is_stopped or super().ends_before_data)

    def updates(self, loader: Any) -> Iterator[Update]:
        """The updates of the current epoch that are still due, until a callback ends it."""
        for update in super().updates(loader):
            yield update
            self.agree_on_control()
            control = self.face.control
            if control.should_epoch_stop or control.should_training_stop:
                return

    def refuse_empty_epoch(self, loader: Any) -> None:
        """End the run with a warning: a stream may be exhausted."""
        warn_user(
            self.ranks,
            f"The training data has nothing more to yield, so the run ends after {self.hooks.run_state.updates} of "
            f"{self.settings.max_num_train_steps} steps. Pass something that can be iterated over again.",
        )
        self.face.control.should_training_stop = True

    def make_step(self, parts: StepParts, kind: type[Step] = FaceStep) -> Step:
        """A step that calls the `training_step` of the Hugging Face trainer."""
        step = super().make_step(parts, ZeroStep if isinstance(self.hooks.optimizer, ZeroOptimizer) else kind)
        assert isinstance(step, FaceStep)
        step.face, step.events, step.training = self.face, self.events, self.training
        return step

    def evaluate_as_requested(self) -> None:
        """Evaluate as the Hugging Face trainer does."""
        self.evaluates_as_requested = True
        try:
            self.training.evaluate_as_requested()
        finally:
            self.evaluates_as_requested = False

    def give_up_prediction(self, reason: str) -> BaseException:
        """The error that ends an evaluation after a signal. A resumed run repeats one that the loop requested."""
        return StopTrainingError(reason) if self.evaluates_as_requested else super().give_up_prediction(reason)

    def prepare_model(self, *, for_training: bool) -> None:
        """Put the model on its device, and measure the time."""
        started = time.perf_counter()
        super().prepare_model(for_training=for_training)
        self.preparation_seconds = None if for_training else time.perf_counter() - started

    def release_model(self) -> None:
        """Remove the wrappers of training from the model."""
        face = self.face
        if isinstance(face.optimizer, EngineOptimizer):  # it would keep all that DeepSpeed holds
            face.optimizer = face.callback_handler.optimizer = face.optimizer.optimizer
        super().release_model()
