"""A training of the Hugging Face trainer: its events, the requests of callbacks, logs and results."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytorch_accelerated.errors import CheckpointError, MissingMetricError
from pytorch_accelerated.huggingface.arguments.fields import IntervalStrategy, SaveStrategy
from pytorch_accelerated.huggingface.engine.step import FaceStep, RankedFaceStep
from pytorch_accelerated.huggingface.trainer_callback import is_log_due
from pytorch_accelerated.huggingface.trainer_utils import (
    TrainOutput,
    meter_memory,
    output_dir_of,
    refuse_steps_taken_by_others,
    speed_metrics,
)
from pytorch_accelerated.huggingface.training_args import TrainingArguments, logger
from pytorch_accelerated.loop.preparing import loader_of_pass
from pytorch_accelerated.loop.training import Training
from pytorch_accelerated.record.loss import LossTracker
from pytorch_accelerated.record.warning import warn_user

if TYPE_CHECKING:
    from pytorch_accelerated.data.updates import RunLoader, Update
    from pytorch_accelerated.huggingface.engine.engine import Engine
    from pytorch_accelerated.huggingface.engine.order import Order
    from pytorch_accelerated.huggingface.events import TrainerState
    from pytorch_accelerated.huggingface.trainer import Trainer
    from pytorch_accelerated.loop.context import Context
    from pytorch_accelerated.ranks.ranks import Ranks

_BEST = ("best_metric", "best_global_step", "best_model_checkpoint")


class FaceTraining(Training):
    """One training of the Hugging Face trainer: its events, the requests of callbacks, logs and results.

    Args:
        context: of the run; its holder is the trainer that users see.
        order: what that trainer asks for.

    Attributes:
        face: the trainer that users see.
        counter: of operations and tokens.
        order: what that trainer asks for.
        log: logs losses.
        started: when it began, in seconds since 1970.
        first_tokens: tokens that were seen before this training.
        evaluates_as_requested: whether an evaluation is running that the loop requested.
        output: the result, once the training is over.
    """

    step: FaceStep
    has_step_records = False  # `logging_steps` says which losses belong together
    keeps_modes = False  # each step does it, as in transformers
    name_of_resume = "resume_from_checkpoint"
    way_to_give_workers = "dataloader_num_workers={0}"

    def __init__(self, context: Context, order: Order) -> None:
        super().__init__(context)
        self.face: Trainer = context.holder
        self._engine: Engine = context.trainer
        self._events = self._engine.events
        self.counter = order.counter
        self.first_tokens = 0
        self.evaluates_as_requested = False
        self.output: TrainOutput | None = None
        self.order, self._args = order, self.face.args
        self.log = TrainingLog(self)
        self._first_step = 0
        self.started = time.time()
        self._memory = meter_memory("train", self._args)
        self._reason_to_stop = ""
        self._kept_loaders: dict[Any, RunLoader] = {}
        self._kept_workers = contextlib.ExitStack()
        context.losses = LossTracker(leaves_out_non_finite=self._args.logging_nan_inf_filter)

    def kind_of_step(self) -> type[FaceStep]:
        """The kind of step that the run needs."""
        return FaceStep if self.context.ranks.count == 1 else RankedFaceStep

    def plan(self, loader: Any) -> int:
        """The number of updates of the run, now that the length of an epoch is known, if there is one."""
        args, state = self._args, self.face.state
        state.num_train_epochs, *_, state.max_steps = self.face.set_initial_training_values(args, loader)
        state.train_batch_size = self.order.batch_size
        state.compute_steps(args, state.max_steps)
        return state.max_steps

    def release(self) -> None:
        """Remove what training wrapped around the model from the trainer that users see, too."""
        super().release()
        self._kept_loaders.clear()
        self._kept_workers.close()

    def loader_of_pass(self, loader: Any) -> contextlib.AbstractContextManager[RunLoader]:
        """This rank's part of an evaluation loader. Persistent workers live until the training is over."""
        part = loader_of_pass(self.context, loader, None)
        if not getattr(loader, "persistent_workers", False):
            return part
        if loader not in self._kept_loaders:
            self._kept_loaders[loader] = self._kept_workers.enter_context(part)
        return contextlib.nullcontext(self._kept_loaders[loader])

    @property
    def epochs_done(self) -> float:
        """Passes over the training set, with the fraction of the current one."""
        state, settings = self.context.state, self.context.settings
        batches: int | None = self.context.loaders.train.num_batches
        if batches is None:
            assert settings.max_num_train_steps is not None
            return state.epochs + state.updates_in_epoch / settings.max_num_train_steps
        return state.epochs + min(state.updates_in_epoch * settings.gradient_accumulation_steps, batches) / batches

    def begin(self) -> None:
        """Prepare callbacks and counts: the engine is about to run."""
        face, engine = self.face, self._engine
        if self._args.save_strategy != SaveStrategy.NO:
            folder, first_step = output_dir_of(self._args), face.state.global_step + 1
            self.context.saves.claim_folder(folder, "output_dir")
            self.context.ranks.do_on_first(
                lambda: refuse_steps_taken_by_others(folder, first_step, face.state.max_steps)
            )
        face.optimizer, face.model_wrapped = engine.optimizer, engine.model
        handler = face.callback_handler
        handler.model, handler.optimizer, handler.lr_scheduler = face.model, face.optimizer, face.lr_scheduler
        handler.train_dataloader = self.context.loaders.train
        self.log, self._first_step = TrainingLog(self), self.face.state.global_step
        self.first_tokens = self.face.state.num_input_tokens_seen
        self.started = time.time()
        logger.info("Training begins: steps %d to %d", face.state.global_step + 1, face.state.max_steps)
        self._events.fire("on_train_begin")
        if self._args.eval_on_start:
            self.face._evaluate(None, self.order.ignore_keys, skip_scheduler=True)

    def may_stop_in_update(self) -> bool:
        """Whether a callback or method of the user may set flags on one rank alone."""
        return bool(self._events.ranks_agree_after_each_update())

    def agree_on_control(self) -> None:
        """Set each flag of the control that any rank has set, where ranks may have callbacks of their own.

        Must be called by all ranks, between events and what is done because of their flags.
        """
        if self.context.uneven is not None and self.all_agree_after_each_update:
            self._events.agree(self.context.ranks)

    @property
    def is_complete(self) -> bool:
        """Whether there is nothing left to train, or a callback ended the training. Epochs that it ended count."""
        self.agree_on_control()
        state = self.context.state
        is_over = state.epochs >= self.face.state.num_train_epochs or (state.is_cut and self.context.is_at_limit)
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
            self.context.ranks,
            f"The training data has nothing more to yield, so the run ends after {self.context.state.updates} of "
            f"{self.context.settings.max_num_train_steps} steps. Pass something that can be iterated over again.",
        )
        self.face.control.should_training_stop = True

    def end_step(self) -> None:
        """Do what is due after an update: the safe point."""
        state = self.face.state
        state.global_step, state.epoch = self.context.state.updates, self.epochs_done
        if self.counter.counts_tokens:
            state.num_input_tokens_seen += self.counter.take_tokens(self.context.ranks)
        self._events.fire("on_step_end")
        self._act_on_control()

    def end_epoch(self) -> None:
        """Do what is due after an epoch."""
        self._events.fire("on_epoch_end")
        self._act_on_control()

    def _act_on_control(self) -> None:
        """Log, and have the engine evaluate or save, in this order, as the control says."""
        self.agree_on_control()
        if self.face.control.should_log:
            self.log.write()
            self.agree_on_control()
        if self.face.control.should_evaluate:
            self._engine.request_evaluation()
        elif self.face.control.should_save:
            self._request_checkpoint()

    def evaluate_as_requested(self) -> None:
        """Evaluate at a safe point, and compare with the best model."""
        self.evaluates_as_requested = True
        try:
            metrics = self.face._evaluate(None, self.order.ignore_keys)
        finally:
            self.evaluates_as_requested = False
        self._best_before = {name: getattr(self.face.state, name) for name in _BEST}
        is_best = self.face._determine_best_metric(metrics, None)
        if self._args.save_strategy == SaveStrategy.BEST:
            self.face.control.should_save = is_best
        self.agree_on_control()
        if self.face.control.should_save:
            self._request_checkpoint()

    def write_state(self, folder: Path, extra: dict[str, Any], background: bool) -> None:
        """Write the checkpoint that callbacks requested, at a safe point."""
        state = self.face.state
        try:
            self.face._save_checkpoint(self.face.model_wrapped, None)
        except CheckpointError:
            if state.best_global_step == state.global_step:  # the weights of the best model are lost
                vars(state).update(self._best_before)
            raise
        logger.info("Saved %s", self._engine.states.checkpoint_folder())
        self._events.fire("on_save")
        self._engine.states.cover_changes(self._engine.states.checkpoint_folder())

    @property
    def name_of_limit(self) -> str:
        """The argument that ends the run."""
        return "max_steps" if self._args.max_steps > 0 else "num_train_epochs"

    def stop_early(self, reason: str) -> None:
        """Note why the run is stopped. Save if a signal did it, and this run has trained anything."""
        self._reason_to_stop = reason
        has_trained = self.face.is_in_train and self.face.state.global_step > self._first_step
        if self.context.stopping.signals.agreed and has_trained and self._args.save_strategy != SaveStrategy.NO:
            self._request_checkpoint()

    def end(self) -> None:
        """Load the best weights if requested, and log the summary: the run is over."""
        if self._args.load_best_model_at_end and self.face.state.best_model_checkpoint is not None:
            self._engine.states.load_best(Path(self.face.state.best_model_checkpoint))
        self.log.take()
        steps = self.face.state.global_step - self._first_step
        train_loss = self.log.mean if steps else 0.0
        metrics = speed_metrics("train", self.started, num_samples=self.step.samples_used, num_steps=steps)
        self.face.store_flos()
        metrics["total_flos"] = self.face.state.total_flos
        metrics["train_loss"] = train_loss
        metrics.update(self._memory())
        self.face.log(metrics)
        self._engine.states.delete_superfluous()
        self._events.note_end(self._reason_to_stop, self.context.state.skipped_updates)
        self._events.fire("on_train_end")
        self.output = TrainOutput(self.face.state.global_step, train_loss, metrics)

    def _request_checkpoint(self) -> None:
        self._engine.save_training_state(self._engine.states.checkpoint_folder())


class TrainingLog:
    """Logs the losses of a training: those of the steps since the last log, which may have been in an earlier epoch.

    Args:
        training: whose loss tracker holds one loss for each step.
    """

    def __init__(self, training: FaceTraining) -> None:
        self._training = training
        self._total = self._count = 0.0
        self._last_step: int = training.face.state.global_step

    def may_be_due(self) -> bool:
        """Whether the current update may be logged: callbacks decide only after it."""
        face = self._training.face
        return (
            face.control.should_log
            or face.callback_handler.ranks_agree_after_each_update()
            or face.args.logging_strategy == IntervalStrategy.EPOCH
            or is_log_due(face.args, face.state, face.state.global_step + 1)
        )

    def write(self) -> None:
        """Log the mean loss of the steps since the last log, if there were any. Must be called by all ranks."""
        training, step = self._training, self._training.step
        if training.face.state.global_step == self._last_step:
            return
        mean, left_out = self.take()
        logs: dict[str, Any] = {"loss": mean}
        norm = step.gradient_norm
        if norm is not None:
            logs["grad_norm"] = norm
        logs["learning_rate"] = float(step.learning_rate)
        if left_out:
            logs["non_finite_losses"] = left_out
        # An overridden `log` need not have the second parameter if tokens are not counted.
        training.face.log(logs, *([training.started] if training.counter.counts_tokens else []))

    def take(self) -> tuple[float, int]:
        """The mean loss of the steps since the last call, and the number of steps left out, with a warning.

        Must be called by all ranks.
        """
        context, step = self._training.context, self._training.face.state.global_step
        steps, self._last_step = step - self._last_step, step
        total, count = context.ranks.sum([context.losses.total_loss, context.losses.running_count])
        context.losses.reset()
        self._total += total
        self._count += count
        left_out = math.ceil(steps - count / context.ranks.count)
        if left_out:
            warn_user(
                context.ranks,
                f"{left_out} of the last {steps} losses were NaN or infinite (up to step {step}). The logged mean "
                "leaves them out, because of `logging_nan_inf_filter`; the weights may be spoilt anyway. Lower the "
                "learning rate, or look for bad rows.",
            )
        # If none counts, use the mean of the run so far.
        return (total / count if count else self.mean), left_out

    @property
    def mean(self) -> float:
        """The mean of all losses that were taken; NaN without any."""
        return self._total / self._count if self._count else math.nan


def note_if_best(state: TrainerState, args: TrainingArguments, metrics: dict[str, float], ranks: Ranks) -> bool:
    """Note the metric in `state` if it is the best so far, and return whether it is.

    Raises:
        MissingMetricError: a KeyError, if ``metric_for_best_model`` is not among `metrics`.
    """
    name = args.metric_for_best_model
    if name is None:
        return False
    value = metric_of(metrics, name)
    if math.isnan(value):
        warn_user(
            ranks,
            f"`metric_for_best_model`, {name!r}, is NaN at step {state.global_step}, so this is not the best model "
            "whatever others are. Look at the evaluation set, and at the logged losses for NaN.",
        )
    best, sign = state.best_metric, 1 if args.greater_is_better else -1
    if math.isnan(value) or (best is not None and not sign * value > sign * best):
        return False
    state.best_metric, state.best_global_step = value, state.global_step
    return True


def metric_of(metrics: dict[str, float], name: str) -> float:
    """A metric of an evaluation, whose name may lack its prefix.

    Raises:
        MissingMetricError: a KeyError; names those that there are.
    """
    name = name if name.startswith("eval_") else f"eval_{name}"
    if name not in metrics:
        raise MissingMetricError(
            f"`metric_for_best_model` is {name!r}, which the evaluation does not have. There is: "
            f"{', '.join(map(repr, metrics))}. Choose one of these, or return it from `compute_metrics`."
        )
    return metrics[name]
