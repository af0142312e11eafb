"""A training of the Hugging Face trainer: its events, the requests of callbacks, logs and results."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn

from pytorch_accelerated.callbacks.warning import warn_user
from pytorch_accelerated.checkpointing.publish import remove_state
from pytorch_accelerated.errors import InvalidCheckpointError
from pytorch_accelerated.huggingface.arguments.strategies import IntervalStrategy, SaveStrategy
from pytorch_accelerated.huggingface.checkpoints.restoring import read_trainer_state, restore_state, take_over_foreign
from pytorch_accelerated.huggingface.checkpoints.saving import holds_run
from pytorch_accelerated.huggingface.collating import BatchCounter
from pytorch_accelerated.huggingface.engine.measuring import LossLog
from pytorch_accelerated.huggingface.engine.step import FaceStep, ZeroStep
from pytorch_accelerated.huggingface.events import is_ours
from pytorch_accelerated.huggingface.trainer_callback import is_log_due
from pytorch_accelerated.huggingface.trainer_utils import (
    MemoryMeter,
    TrainOutput,
    checkpoint_name,
    output_dir_of,
    refuse_steps_taken_by_others,
    sort_checkpoints,
    speed_metrics,
)
from pytorch_accelerated.huggingface.training_args import TrainingArguments, logger
from pytorch_accelerated.models.deepspeed import EngineOptimizer, ZeroOptimizer
from pytorch_accelerated.models.kept import Kept
from pytorch_accelerated.progress.text import format_update_size
from pytorch_accelerated.steps.splitting import is_out_of_memory
from pytorch_accelerated.steps.step import Step
from pytorch_accelerated.tracking.loss import LossTracker
from pytorch_accelerated.training.preparing import loader_of_pass
from pytorch_accelerated.training.training import Training

if TYPE_CHECKING:
    from pytorch_accelerated.data.updates import RunLoader, Update
    from pytorch_accelerated.facts.context import Context
    from pytorch_accelerated.huggingface.engine.engine import Engine
    from pytorch_accelerated.huggingface.engine.states import CheckpointStates
    from pytorch_accelerated.huggingface.events import Events, TrainerControl, TrainerState
    from pytorch_accelerated.huggingface.trainer import Trainer
    from pytorch_accelerated.processes.ranks import Ranks

Result = TypeVar("Result")


@dataclasses.dataclass(frozen=True)
class Overridable:
    """Methods of `transformers`' Trainer that scripts override although their names begin with an underscore."""

    evaluate: Callable[..., dict[str, float]]
    determine_best_metric: Callable[[dict[str, float], Any], bool]
    save_checkpoint: Callable[[Any, Any], None]
    load_from_checkpoint: Callable[[str], None]
    load_best_model: Callable[[], None]
    load_callback_state: Callable[[], None]


@dataclasses.dataclass(frozen=True)
class Order:
    """What the trainer that users see asks of one training.

    Attributes:
        own: methods of the trainer.
        counter: of operations and tokens.
        batch_size: rows of a batch on one device.
        ignore_keys: outputs of the model that evaluations leave out.
    """

    own: Overridable
    counter: BatchCounter
    batch_size: int
    ignore_keys: Any


class FaceTraining(Training):
    """One training of the Hugging Face trainer: its events, the requests of callbacks, logs and results.

    Args:
        context: of the run; its holder is the trainer that users see.
        order: what that trainer asks for.

    Attributes:
        face: the trainer that users see.
        counter: of operations and tokens.
        first_tokens: tokens that were seen before this training.
        evaluates_as_requested: whether an evaluation is running that the loop requested.
        output: the result, once the training is over.
    """

    has_step_records = False  # `logging_steps` says which losses belong together

    def __init__(self, context: Context, order: Order) -> None:
        super().__init__(context)
        self.face: Trainer = context.holder
        self.counter = order.counter
        self.first_tokens = 0
        self.evaluates_as_requested = False
        self.output: TrainOutput | None = None
        self._order, self._args = order, self.face.args
        self._meter = MemoryMeter("train", is_on=not self._args.skip_memory_metrics)
        self._log = LossLog(context)
        self._first_step = 0
        self._started = time.time()
        self._reason_to_stop = ""
        self._kept_loaders: dict[Any, RunLoader] = {}
        self._kept_workers = contextlib.ExitStack()
        context.losses = LossTracker(leaves_out_non_finite=self._args.logging_nan_inf_filter)

    @property
    def _engine(self) -> Engine:
        engine: Engine = self.context.trainer
        return engine

    @property
    def _states(self) -> CheckpointStates:
        return self.context.states  # type: ignore[return-value]

    @property
    def _events(self) -> Events:
        return self._engine.events

    @property
    def _state(self) -> TrainerState:
        return self.face.state

    @property
    def _control(self) -> TrainerControl:
        return self.face.control

    @property
    def _output_dir(self) -> Path:
        return output_dir_of(self._args)

    def plan(self, loader: Any) -> int:
        """The number of updates of the run, now that the length of an epoch is known, if there is one."""
        args, state = self._args, self._state
        state.num_train_epochs, *_, state.max_steps = self.face.set_initial_training_values(args, loader)
        state.train_batch_size = self._order.batch_size
        state.compute_steps(args, state.max_steps)
        return state.max_steps

    @property
    def face_step(self) -> FaceStep:
        """Does the updates of this training."""
        return self.step  # type: ignore[return-value]

    def make_step(self, kind: type[Step] = FaceStep, *, steps_scheduler: bool) -> None:
        """A step that calls the `training_step` of the trainer."""
        kind = ZeroStep if isinstance(self.context.optimizer, ZeroOptimizer) else kind
        super().make_step(kind, steps_scheduler=steps_scheduler)

    def release(self) -> None:
        """Remove what training wrapped around the model from the trainer that users see, too."""
        face = self.face
        if isinstance(face.optimizer, EngineOptimizer):  # it would keep all that DeepSpeed holds
            face.optimizer = face.callback_handler.optimizer = face.optimizer.optimizer
        super().release()
        self._kept_loaders.clear()
        self._kept_workers.close()

    def kept_loader(self, loader: Any) -> RunLoader:
        """This rank's part of an evaluation loader, whose workers live until the training is over."""
        if loader not in self._kept_loaders:
            part = loader_of_pass(self.context, loader, None)
            self._kept_loaders[loader] = self._kept_workers.enter_context(part)
        return self._kept_loaders[loader]

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
        first_step, max_steps = self._state.global_step + 1, self._state.max_steps
        if self._args.save_strategy != SaveStrategy.NO:
            self.context.saves.claim_folder(self._output_dir, "output_dir")
            folder, first = self._output_dir, self.context.ranks.do_on_first
            first(lambda: refuse_steps_taken_by_others(folder, first_step, max_steps))
        face.optimizer, face.model_wrapped = engine.optimizer, engine.model
        handler = face.callback_handler
        handler.model, handler.optimizer, handler.lr_scheduler = face.model, face.optimizer, face.lr_scheduler
        handler.train_dataloader = self.context.loaders.train
        self._log, self._first_step = LossLog(self.context), self._state.global_step
        self.first_tokens = self._state.num_input_tokens_seen
        self._started = time.time()
        logger.info(
            "Training begins: steps %d to %d, %s",
            first_step,
            max_steps,
            format_update_size(self._order.batch_size, self._args.gradient_accumulation_steps, self._args.world_size),
        )
        self._events.fire("on_train_begin")
        if self._args.eval_on_start:
            self._order.own.evaluate(None, self._order.ignore_keys, skip_scheduler=True)

    def may_stop_in_update(self) -> bool:
        """Whether a callback or method of the user may set flags on one rank alone."""
        return self._events.ranks_agree_after_each_update()

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
        is_over = state.epochs >= self.face.state.num_train_epochs or (state.is_cut and self.context.updates_left == 0)
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

    def may_log_step(self) -> bool:
        """Whether the current update may be logged: callbacks decide only after it."""
        args, handler = self._args, self.face.callback_handler
        return (
            self._control.should_log
            or handler.ranks_agree_after_each_update()
            or args.logging_strategy == IntervalStrategy.EPOCH
            or is_log_due(args, self._state, self._state.global_step + 1)
        )

    def end_step(self) -> None:
        """Do what is due after an update: the safe point."""
        state = self._state
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
        if self._control.should_log:
            self._log_losses()
            self.agree_on_control()
        if self._control.should_evaluate:
            self._engine.request_evaluation()
        elif self._control.should_save:
            self._request_checkpoint()

    def evaluate_as_requested(self) -> None:
        """Evaluate at a safe point, and compare with the best model."""
        self.evaluates_as_requested = True
        try:
            metrics = self._order.own.evaluate(None, self._order.ignore_keys)
        finally:
            self.evaluates_as_requested = False
        is_best = self._order.own.determine_best_metric(metrics, None)
        if self._args.save_strategy == SaveStrategy.BEST:
            self._control.should_save = is_best
        self.agree_on_control()
        if self._control.should_save:
            self._request_checkpoint()

    def write_state(self, folder: Path, extra: dict[str, Any], background: bool) -> None:
        """Write the checkpoint that callbacks requested, at a safe point."""
        self._order.own.save_checkpoint(self.face.model_wrapped, None)
        logger.info("Saved %s", self.checkpoint_folder())
        self._events.fire("on_save")
        self._states.cover_changes(self.checkpoint_folder())

    def stop_early(self, reason: str) -> None:
        """Note why the run is stopped. Save if a signal did it, and this run has trained anything."""
        self._reason_to_stop = reason
        has_trained = self.face.is_in_train and self._state.global_step > self._first_step
        if self.context.stopping.signals.agreed and has_trained and self._args.save_strategy != SaveStrategy.NO:
            self._request_checkpoint()

    def end(self) -> None:
        """Load the best weights if requested, and log the summary: the run is over."""
        if self._args.load_best_model_at_end and self._state.best_model_checkpoint is not None:
            self._load_best_model_at_end(Path(self._state.best_model_checkpoint))
        self._log.take()
        steps = self._state.global_step - self._first_step
        train_loss = self._log.mean if steps else 0.0
        metrics = speed_metrics("train", self._started, num_samples=self.face_step.samples_used, num_steps=steps)
        self.face.store_flos()
        metrics["total_flos"] = self._state.total_flos
        metrics["train_loss"] = train_loss
        metrics.update({**self._engine.init_metrics, **self._meter.stop()})
        self.face.log(metrics)
        self._delete_superfluous_checkpoints()
        skipped, warnings = self.context.state.skipped_updates, self.context.shown_warnings.count
        self._events.note_end(self._reason_to_stop, skipped, warnings)
        self._events.fire("on_train_end")
        self.output = TrainOutput(self._state.global_step, train_loss, metrics)

    def _load_best_model_at_end(self, best: Path) -> None:
        try:
            self._order.own.load_best_model()
        except InvalidCheckpointError as error:
            reason = str(error) if best.is_dir() else "its folder is gone."
            raise InvalidCheckpointError(
                f"The run is over, but the best model, {best}, cannot be loaded: {reason} The model has the "
                "weights of the last step: write them with `trainer.save_model(...)`. The log history is in "
                "`trainer.state.log_history`."
            ) from error

    def checkpoint_folder(self, step: int | None = None) -> Path:
        """The checkpoint of a step, by default the current one."""
        return self._output_dir / checkpoint_name(self._state.global_step if step is None else step)

    def _request_checkpoint(self) -> None:
        self._engine.save_training_state(self.checkpoint_folder())

    def note_best_checkpoint(self, folder: Path) -> None:
        """Note the checkpoint of the best model: `folder`, which is about to be written, or an earlier one."""
        if self._state.best_global_step is None:
            return
        best = self.checkpoint_folder(self._state.best_global_step)
        if best == folder or self.context.ranks.from_first(best.is_dir()):
            self._state.best_model_checkpoint = str(best)

    def _delete_superfluous_checkpoints(self) -> None:
        """Keep only the best checkpoint at the end, if the limit is 1."""
        best, args = self._state.best_model_checkpoint, self._args
        if not (args.should_save and args.load_best_model_at_end and args.save_total_limit == 1 and best is not None):
            return
        for path in sort_checkpoints(self._output_dir):
            if Path(path).resolve() != Path(best).resolve():
                remove_state(Path(path))

    def resume(self, folder: Path) -> None:
        """Load a checkpoint, now that everything it belongs to exists."""
        saved = read_trainer_state(folder)
        if holds_run(folder):
            self._states.load_checkpoint(folder)
            if not is_ours(self._order.own.load_from_checkpoint):  # which may load more
                self._order.own.load_from_checkpoint(str(folder))
        else:
            load_weights = functools.partial(self._order.own.load_from_checkpoint, str(folder))
            take_over_foreign(self._engine, folder, saved.global_step, load_weights)
        restore_state(self._state, saved, self._args, self.context.ranks)
        self._order.own.load_callback_state()
        if self._args.ignore_data_skip:
            self.context.state.samples_in_epoch = self.context.state.batches_in_epoch = 0
        if self.context.state.is_evaluation_due:
            self._control.should_save = self._args.save_strategy != SaveStrategy.NO

    def _log_losses(self) -> None:
        """Log the mean loss of the steps since the last log, if there were any."""
        if self._state.global_step == self._log.last_step:
            return
        mean, left_out = self._log.take()
        logs: dict[str, Any] = {"loss": mean}
        norm = self.face_step.gradient_norm
        if norm is not None:
            logs["grad_norm"] = norm
        logs["learning_rate"] = float(self.face_step.learning_rate)
        if left_out:
            logs["non_finite_losses"] = left_out
        # An overridden `log` need not have the second parameter if tokens are not counted.
        self.face.log(logs, *([self._started] if self.counter.counts_tokens else []))


def warn_of_earlier_checkpoints(args: TrainingArguments, ranks: Ranks) -> None:
    """Warn if saving will delete checkpoints that this run has not written."""
    limit, folder = args.save_total_limit, output_dir_of(args)
    if limit is None or args.save_strategy == SaveStrategy.NO or not ranks.is_first:
        return
    names = [Path(path).name for path in sort_checkpoints(folder)]
    if names:
        warn_user(
            ranks,
            f"{folder} holds {', '.join(names)} of an earlier run, and `save_total_limit` is {limit}: this run will "
            "delete them as it saves. To keep them, give another `output_dir`; to continue that run, call "
            "`train(resume_from_checkpoint=True)`.",
        )


def with_batches_that_fit(
    run: Callable[[int], Result],
    batch_size: int,
    model: nn.Module,
    stateful: Sequence[Any],
    warn: Callable[[str], None],
) -> Result:
    """The result of `run`, which is called with half the batch size as often as it runs out of memory.

    Before each call, weights, optimizer, schedule and generators are what they were before the first one, so the call
    that succeeds equals one without failed attempts. Callbacks have seen these, however.

    Args:
        stateful: the optimizer and the schedule, as far as they exist already.

    Raises:
        torch.OutOfMemoryError: if a single row does not fit.
    """
    before = Kept()
    before.generators()
    for part in stateful:
        state = copy.deepcopy(part.state_dict())
        before.call(lambda part=part, state=state: part.load_state_dict(copy.deepcopy(state)))
    before.tensors(chain(model.parameters(), model.buffers()), device="cpu")
    while True:
        try:
            return run(batch_size)
        except RuntimeError as error:
            if batch_size == 1 or not is_out_of_memory(error):
                raise
        # Here the traceback of the error no longer holds the tensors of the failed attempt.
        before.restore()
        model.zero_grad()
        if torch.accelerator.is_available():
            torch.accelerator.empty_cache()
        warn(
            f"Batches of {batch_size} rows do not fit into memory, so the run restarts with {batch_size // 2} "
            "(`auto_find_batch_size`). To avoid the failed attempt, set `per_device_train_batch_size`."
        )
        batch_size //= 2
