"""A run of the Hugging Face trainer: the native run, with the seeds, states and events of that API."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

from pytorch_accelerated.callbacks.warning import warn_user
from pytorch_accelerated.checkpointing.state_folder import read_state, write_encoded
from pytorch_accelerated.checkpointing.training_state import save_run
from pytorch_accelerated.data.updates import Update
from pytorch_accelerated.errors import StopTrainingError
from pytorch_accelerated.huggingface.engine.face import Face, TrainingHooks
from pytorch_accelerated.huggingface.engine.step import FaceStep, ZeroStep
from pytorch_accelerated.huggingface.events.firing import Events
from pytorch_accelerated.huggingface.models.adapters import BASE_KEY, fingerprint_of, frozen_base
from pytorch_accelerated.models.deepspeed import EngineOptimizer, ZeroOptimizer
from pytorch_accelerated.models.sharding import has_shards
from pytorch_accelerated.tracking.loss import LossTracker
from pytorch_accelerated.training.run import Run
from pytorch_accelerated.training.step import Step, StepParts


class EngineRun(Run):
    """What lives as long as one call of the engine.

    The loss tracker holds the losses since the last log, which may have been in an earlier epoch.

    Attributes:
        face: the trainer that users see.
        events: calls its callbacks.
        training: the current training, or the last one if this is an evaluation outside of a training.
        take_items: returns the numbers of items in the batches since its last call.
        evaluates_as_requested: whether an evaluation is running that the loop requested.
        preparation_seconds: the time it took to prepare the model for an evaluation.
    """

    face: Face
    events: Events
    training: TrainingHooks
    take_items: Callable[[], list[int | None]]
    evaluates_as_requested = False
    preparation_seconds: float | None = None
    has_step_records = False  # `logging_steps` says which losses belong together

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

    def write_checkpoint(self, folder: Path, write_others: Callable[[Path], None]) -> None:
        """Write the state of this run and the files of `write_others` to a folder. All ranks must call it."""
        model = self.face.model
        self.check_finite()
        frozen = frozen_base(model)
        save_run(
            self.contents(),
            folder,
            {BASE_KEY: fingerprint_of(model, frozen)} if frozen else {},
            write_others=write_others,
            skipped_weights=frozen,
            has_optimizer_file=not has_shards(model),  # whose parts each rank writes itself
        )
        self.saves.add(folder, self.hooks.run_history, self.hooks.run_state)

    def write_model(self, folder: Path, write_others: Callable[[Path], None]) -> None:
        """Write a folder with only the files of `write_others`. All ranks must call it."""
        self.check_finite()
        state = self.hooks.run_state
        facts = {"updates": state.updates, "epochs": state.epochs}
        self.ranks.do_on_first(lambda: write_encoded(folder, facts, {}, write_others=write_others))
        self.saves.add(folder, self.hooks.run_history, self.hooks.run_state)

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
        """Whether there is nothing left to train, or a callback ended the training."""
        self.agree_on_control()
        return bool(self.face.control.should_training_stop) or super().is_complete

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
        step.take_items = None if self.count_items is None else self.take_items
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
