"""A training of the Hugging Face trainer: its events, the requests of callbacks, logs and results."""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
import time
from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn

from pytorch_accelerated.callbacks.warning import warn_user
from pytorch_accelerated.checkpointing.publish import remove_state
from pytorch_accelerated.errors import InvalidCheckpointError, MissingMetricError
from pytorch_accelerated.huggingface.arguments.strategies import IntervalStrategy, SaveStrategy
from pytorch_accelerated.huggingface.checkpoints.restoring import read_trainer_state, restore_state, take_over_foreign
from pytorch_accelerated.huggingface.checkpoints.saving import holds_run
from pytorch_accelerated.huggingface.collating import BatchCounter
from pytorch_accelerated.huggingface.engine.engine import Engine
from pytorch_accelerated.huggingface.events import TrainerControl, TrainerState, is_ours
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
from pytorch_accelerated.processes.ranks import Ranks
from pytorch_accelerated.progress.formats import format_update_size
from pytorch_accelerated.seeding import generator_states, restore_generator_states
from pytorch_accelerated.steps.splitting import is_out_of_memory

if TYPE_CHECKING:
    from pytorch_accelerated.huggingface.trainer import Trainer

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


class Training:
    """One training, as the engine informs it of its progress.

    Args:
        face: the trainer that users see.
        engine: the native trainer.
        own: methods of the trainer.
        counter: of operations and tokens.
        batch_size: rows of a batch on one device.
        ignore_keys: outputs of the model that evaluations leave out.

    Attributes:
        first_tokens: tokens that were seen before this training.
        output: the result, once the training is over.
    """

    def __init__(
        self,
        face: Trainer,
        engine: Engine,
        own: Overridable,
        *,
        counter: BatchCounter,
        batch_size: int,
        ignore_keys: Any = None,
    ) -> None:
        self._face, self._engine, self._events, self._own = face, engine, engine.events, own
        self._args = face.args
        self.counter = counter
        self.batch_size = batch_size
        self._ignore_keys = ignore_keys
        self._output_dir = output_dir_of(self._args)
        self._meter = MemoryMeter("train", is_on=not self._args.skip_memory_metrics)
        self._loss_total = self._loss_count = 0.0
        self._last_logged_step = self._first_step = 0
        self._started = time.time()
        self._reason_to_stop = ""
        self.first_tokens = 0
        self.output: TrainOutput | None = None

    @property
    def _state(self) -> TrainerState:
        return self._face.state

    @property
    def _control(self) -> TrainerControl:
        return self._face.control

    def run(self, checkpoint: Path | None) -> TrainOutput:
        """Train."""
        args, face = self._args, self._face
        if checkpoint is None:
            self._warn_of_earlier_checkpoints()
        face.is_in_train = True
        try:
            self._engine.run_training(
                self,
                face.train_dataset,
                num_epochs=math.ceil(args.num_train_epochs) or None,  # None: `max_steps` says when to stop
                per_device_batch_size=self.batch_size,
                max_num_train_steps=args.max_steps if args.max_steps > 0 else None,
                gradient_accumulation_steps=args.gradient_accumulation_steps,
                gradient_clip_norm=args.max_grad_norm or None,
                resume_from=checkpoint,
                # The metric that a schedule watches is looked up here, not in the native history.
                scheduler_metric="train_loss_epoch",
            )
        finally:
            face.is_in_train = False
            face.model_wrapped = face.model
        assert self.output is not None
        return self.output

    def _warn_of_earlier_checkpoints(self) -> None:
        """Warn if saving will delete checkpoints that this run has not written."""
        limit, ranks = self._args.save_total_limit, self._engine.ranks
        if limit is None or self._args.save_strategy == SaveStrategy.NO or not ranks.is_first:
            return
        names = [Path(path).name for path in sort_checkpoints(self._output_dir)]
        if names:
            warn_user(
                ranks,
                f"{self._output_dir} holds {', '.join(names)} of an earlier run, and `save_total_limit` is {limit}: "
                "this run will delete them as it saves. To keep them, give another `output_dir`; to continue that run, "
                "call `train(resume_from_checkpoint=True)`.",
            )

    def plan(self, loader: Any) -> int:
        """The number of updates of the run, now that the length of an epoch is known, if there is one."""
        args, state = self._args, self._state
        state.num_train_epochs, *_, state.max_steps = self._face.set_initial_training_values(args, loader)
        state.train_batch_size = self.batch_size
        state.compute_steps(args, state.max_steps)
        return state.max_steps

    def begin(self) -> None:
        """Prepare callbacks and counts: the engine is about to run."""
        face, engine = self._face, self._engine
        first_step, max_steps = self._state.global_step + 1, self._state.max_steps
        if self._args.save_strategy != SaveStrategy.NO:
            engine.run.saves.claim_folder(self._output_dir, "output_dir")
            engine.ranks.do_on_first(lambda: refuse_steps_taken_by_others(self._output_dir, first_step, max_steps))
        face.optimizer, face.model_wrapped = engine.optimizer, engine.model
        handler = face.callback_handler
        handler.model, handler.optimizer, handler.lr_scheduler = face.model, face.optimizer, face.lr_scheduler
        handler.train_dataloader = engine.train_loader
        self._last_logged_step = self._first_step = self._state.global_step
        self.first_tokens = self._state.num_input_tokens_seen
        self._started = time.time()
        logger.info(
            "Training begins: steps %d to %d, %s",
            first_step,
            max_steps,
            format_update_size(self.batch_size, self._args.gradient_accumulation_steps, self._args.world_size),
        )
        self._events.fire("on_train_begin")
        if self._args.eval_on_start:
            self._own.evaluate(None, self._ignore_keys, skip_scheduler=True)

    def may_log_step(self) -> bool:
        """Whether the current update may be logged: callbacks decide only after it."""
        args, handler = self._args, self._face.callback_handler
        return (
            self._control.should_log
            or handler.ranks_agree_after_each_update()
            or args.logging_strategy == IntervalStrategy.EPOCH
            or is_log_due(args, self._state, self._state.global_step + 1)
        )

    def end_step(self) -> None:
        """Do what is due after an update: the safe point."""
        state, engine = self._state, self._engine
        state.global_step, state.epoch = engine.run_state.updates, engine.epochs_done
        if self.counter.counts_tokens:
            state.num_input_tokens_seen += self.counter.take_tokens(engine.ranks)
        self._events.fire("on_step_end")
        self._act_on_control()

    def end_epoch(self) -> None:
        """Do what is due after an epoch."""
        self._events.fire("on_epoch_end")
        self._act_on_control()

    def _act_on_control(self) -> None:
        """Log, and have the engine evaluate or save, in this order, as the control says."""
        self._engine.run.agree_on_control()
        if self._control.should_log:
            self._log_losses()
            self._engine.run.agree_on_control()
        if self._control.should_evaluate:
            self._engine.request_evaluation()
        elif self._control.should_save:
            self._request_checkpoint()

    def evaluate_as_requested(self) -> None:
        """Evaluate at a safe point, and compare with the best model."""
        metrics = self._own.evaluate(None, self._ignore_keys)
        is_best = self._own.determine_best_metric(metrics, None)
        if self._args.save_strategy == SaveStrategy.BEST:
            self._control.should_save = is_best
        self._engine.run.agree_on_control()
        if self._control.should_save:
            self._request_checkpoint()

    def save_as_requested(self) -> None:
        """Save at a safe point."""
        self._own.save_checkpoint(self._face.model_wrapped, None)
        logger.info("Saved %s", self.checkpoint_folder())
        self._events.fire("on_save")
        self._engine.run.cover_changes(self.checkpoint_folder())

    def stop_early(self, reason: str) -> None:
        """Note why the run is stopped. Save if a signal did it, and this run has trained anything."""
        self._reason_to_stop = reason
        has_trained = self._face.is_in_train and self._state.global_step > self._first_step
        if self._engine.run.stopping.signals.agreed and has_trained and self._args.save_strategy != SaveStrategy.NO:
            self._request_checkpoint()

    def end(self) -> None:
        """Load the best weights if requested, and log the summary: the run is over."""
        if self._args.load_best_model_at_end and self._state.best_model_checkpoint is not None:
            self._load_best_model_at_end(Path(self._state.best_model_checkpoint))
        self._take_losses()
        steps = self._state.global_step - self._first_step
        without_loss = math.nan if steps else 0.0
        train_loss = self._loss_total / self._loss_count if self._loss_count else without_loss
        metrics = speed_metrics("train", self._started, num_samples=self._engine.step.samples_used, num_steps=steps)
        self._face.store_flos()
        metrics["total_flos"] = self._state.total_flos
        metrics["train_loss"] = train_loss
        metrics.update({**self._engine.init_metrics, **self._meter.stop()})
        self._face.log(metrics)
        self._delete_superfluous_checkpoints()
        run = self._engine.run
        self._events.note_end(self._reason_to_stop, self._engine.run_state.skipped_updates, run.shown_warnings.count)
        self._events.fire("on_train_end")
        self.output = TrainOutput(self._state.global_step, train_loss, metrics)

    def _load_best_model_at_end(self, best: Path) -> None:
        try:
            self._own.load_best_model()
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
        if best == folder or self._engine.ranks.from_first(best.is_dir()):
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
        engine = self._engine
        if holds_run(folder):
            engine.run.load_checkpoint(folder)
            if not is_ours(self._own.load_from_checkpoint):  # which may load more
                self._own.load_from_checkpoint(str(folder))
        else:
            load_weights = functools.partial(self._own.load_from_checkpoint, str(folder))
            take_over_foreign(engine, folder, saved.global_step, load_weights)
        restore_state(self._state, saved, self._args, engine.ranks)
        self._own.load_callback_state()
        if self._args.ignore_data_skip:
            engine.run_state.samples_in_epoch = engine.run_state.batches_in_epoch = 0
        if engine.run_state.is_evaluation_due:
            self._control.should_save = self._args.save_strategy != SaveStrategy.NO

    def _log_losses(self) -> None:
        """Log the mean loss of the steps since the last log, if there were any."""
        steps = self._state.global_step - self._last_logged_step
        if not steps:
            return
        mean, left_out = self._take_losses()
        engine = self._engine
        logs: dict[str, Any] = {"loss": mean}
        norm = self._engine.step.gradient_norm
        if norm is not None:
            logs["grad_norm"] = norm
        logs["learning_rate"] = float(engine.learning_rate)
        if left_out:
            logs["non_finite_losses"] = left_out
        # An overridden `log` need not have the second parameter if tokens are not counted.
        self._face.log(logs, *([self._started] if self.counter.counts_tokens else []))

    def _take_losses(self) -> tuple[float, int]:
        """The mean loss of the steps since the last call, and the number of steps left out, with a warning.

        Must be called by all ranks.
        """
        tracker, ranks = self._engine.run.losses, self._engine.ranks
        steps = self._state.global_step - self._last_logged_step
        total, count = ranks.sum([tracker.total_loss, tracker.running_count])
        tracker.reset()
        self._last_logged_step = self._state.global_step
        self._loss_total += total
        self._loss_count += count
        left_out = math.ceil(steps - count / ranks.count)
        if left_out:
            warn_user(
                self._engine.ranks,
                f"{left_out} of the last {steps} losses were NaN or infinite (up to step {self._state.global_step}). "
                "The logged mean leaves them out, because of `logging_nan_inf_filter`; the weights may be spoilt "
                "anyway. Lower the learning rate, or look for bad rows.",
            )
        # If none counts, use the mean of the run so far.
        total, count = (total, count) if count else (self._loss_total, self._loss_count)
        return (total / count if count else math.nan), left_out


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
    weights = [tensor.detach().to("cpu", copy=True) for tensor in chain(model.parameters(), model.buffers())]
    states = [copy.deepcopy(part.state_dict()) for part in stateful]
    generators = generator_states()
    while True:
        try:
            return run(batch_size)
        except RuntimeError as error:
            if batch_size == 1 or not is_out_of_memory(error):
                raise
        # Here the traceback of the error no longer holds the tensors of the failed attempt.
        with torch.no_grad():
            for tensor, value in zip(chain(model.parameters(), model.buffers()), weights, strict=True):
                tensor.copy_(value)
        model.zero_grad()
        for part, state in zip(stateful, states, strict=True):
            part.load_state_dict(copy.deepcopy(state))
        restore_generator_states(generators)
        if torch.accelerator.is_available():
            torch.accelerator.empty_cache()
        warn(
            f"Batches of {batch_size} rows do not fit into memory, so the run restarts with {batch_size // 2} "
            "(`auto_find_batch_size`). To avoid the failed attempt, set `per_device_train_batch_size`."
        )
        batch_size //= 2
