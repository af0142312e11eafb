"""What a run of the engine is for a Hugging Face trainer: its events, what callbacks ask for, logs and results."""

from __future__ import annotations

import math
import numbers
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from pytorch_accelerated.callbacks.warning import warn_user
from pytorch_accelerated.checkpointing.publish import remove_state
from pytorch_accelerated.checkpointing.shared_disk import agree_on_resuming
from pytorch_accelerated.errors import ArgumentTypeError, HookOutputError, InvalidCheckpointError, MissingMetricError
from pytorch_accelerated.huggingface.arguments.strategies import IntervalStrategy, SaveStrategy
from pytorch_accelerated.huggingface.arguments.training_arguments import TrainingArguments, logger
from pytorch_accelerated.huggingface.checkpoints.folders import (
    checkpoint_name,
    refuse_steps_taken_by_others,
    sort_checkpoints,
)
from pytorch_accelerated.huggingface.checkpoints.restoring import (
    optimizer_settings,
    read_trainer_state,
    take_over_foreign,
    take_over_state,
    warn_about_settings,
)
from pytorch_accelerated.huggingface.checkpoints.saving import find_checkpoint, holds_run
from pytorch_accelerated.huggingface.engine.counting import BatchCounter
from pytorch_accelerated.huggingface.engine.determinism import enable_full_determinism
from pytorch_accelerated.huggingface.engine.measuring import MemoryMeter, speed_metrics
from pytorch_accelerated.huggingface.evaluation.outputs import TrainOutput
from pytorch_accelerated.huggingface.events.callbacks import is_log_due, is_ours
from pytorch_accelerated.huggingface.events.state import TrainerControl, TrainerState, exported_states
from pytorch_accelerated.prediction.padded import PADDING
from pytorch_accelerated.progress.formats import format_update_size
from pytorch_accelerated.seeding import set_seed

if TYPE_CHECKING:
    from pytorch_accelerated.huggingface.engine.engine import Engine
    from pytorch_accelerated.huggingface.events.callbacks import CallbackHandler


class TrainerFlow:
    """The part of the trainer that the engine calls; the trainer itself is what users call."""

    args: TrainingArguments
    state: TrainerState
    control: TrainerControl
    callback_handler: CallbackHandler
    model: Any
    model_wrapped: Any
    optimizer: Any
    lr_scheduler: Any
    train_dataset: Any
    processing_class: Any
    compute_loss_func: Callable[..., Any] | None
    model_accepts_loss_kwargs: bool
    is_in_train: bool
    control_is_agreed = False  # by the ranks, since the last event
    _engine: Engine
    _init_metrics: dict[str, int]
    _train_batch_size: int
    _ignore_keys_for_eval: Sequence[str] | None

    # ------------------------------------------------------------------------------------------------- events

    def fire(self, event: str) -> None:
        """Tell the callbacks."""
        self.take_over(self.callback_handler.fire(event, self.args, self.state, self.control))

    def take_over(self, control: TrainerControl) -> None:
        """The control that callbacks leave is ours from then on; on other ranks they may ask for other things."""
        self.control = control
        self.control_is_agreed = False

    def ranks_agree_after_each_update(self) -> bool:
        """Whether some callback or method is the user's, which may ask for something on one rank alone."""
        return self.callback_handler.ranks_agree_after_each_update() or not is_ours(self)

    # ------------------------------------------------------------------------------------------- a training run

    def _run_training(self, checkpoint: Path | None) -> TrainOutput:
        """One run of the engine."""
        args = self.args
        self.state = self._new_state()
        self._output: TrainOutput | None = None
        self._loss_total = self._loss_count = 0.0
        self._last_logged_step = self._first_step = 0
        self._counter = BatchCounter(
            self.floating_point_ops,
            tokens_counted=str(args.include_num_input_tokens_seen),
            input_name=self._main_input_name,
            pad_token_id=getattr(self.processing_class, "pad_token_id", None),
        )
        self._meter = self._memory_meter("train")
        self.is_in_train = True
        try:
            self._engine.model = self.model
            self._engine.train(
                self.train_dataset,
                num_epochs=math.ceil(args.num_train_epochs) or None,  # None: `max_steps` says when to stop
                per_device_batch_size=self._train_batch_size,
                max_num_train_steps=args.max_steps if args.max_steps > 0 else None,
                gradient_accumulation_steps=args.gradient_accumulation_steps,
                gradient_clip_norm=args.max_grad_norm or None,
                resume_from=checkpoint,
                # What a schedule watches is looked up here, not in the native history.
                scheduler_metric="train_loss_epoch",
            )
        finally:
            self._engine.end_kept_workers()
            self.is_in_train = False
            self.model_wrapped = self.model
        assert self._output is not None
        return self._output

    def plan(self, updates_per_epoch: int | None) -> int:
        """How many updates the run has, now that the length of an epoch is known, if there is one."""
        args, state = self.args, self.state
        if args.max_steps > 0:
            state.max_steps = args.max_steps
            state.num_train_epochs = -(-args.max_steps // updates_per_epoch) if updates_per_epoch else sys.maxsize
        else:
            assert updates_per_epoch is not None  # else the engine could not have been started
            state.max_steps = math.ceil(args.num_train_epochs * updates_per_epoch)
            state.num_train_epochs = math.ceil(args.num_train_epochs)
        state.train_batch_size = self._train_batch_size
        state.compute_steps(args, state.max_steps)
        return state.max_steps

    def begin_training(self) -> None:
        """The engine is about to run."""
        handler, engine = self.callback_handler, self._engine
        first_step, max_steps = self.state.global_step + 1, self.state.max_steps
        if self.args.save_strategy != SaveStrategy.NO:
            engine.run.saves.claim_folder(self._output_dir, "output_dir")
            engine.ranks.do_on_first(lambda: refuse_steps_taken_by_others(self._output_dir, first_step, max_steps))
        self.optimizer, self.model_wrapped = engine.optimizer, engine.model
        handler.model, handler.optimizer, handler.lr_scheduler = self.model, self.optimizer, self.lr_scheduler
        handler.train_dataloader = engine.train_loader
        self._last_logged_step = self._first_step = self.state.global_step
        self._first_tokens = self.state.num_input_tokens_seen
        self._started = time.time()
        logger.info(
            "Training begins: steps %d to %d, %s",
            self.state.global_step + 1,
            self.state.max_steps,
            format_update_size(self._train_batch_size, self.args.gradient_accumulation_steps, self.args.world_size),
        )
        self.fire("on_train_begin")
        if self.args.eval_on_start:
            self._evaluate(None, self._ignore_keys_for_eval, skip_scheduler=True)

    def count_batch(self, batch: Any) -> None:
        """Count the tokens and operations of a training batch."""
        self._counter.count(batch)

    def may_log_step(self) -> bool:
        """Whether the update at work may be logged. It is not known for sure before callbacks have had their say."""
        args, handler = self.args, self.callback_handler
        return (
            self.control.should_log
            or handler.ranks_agree_after_each_update()
            or args.logging_strategy == IntervalStrategy.EPOCH
            or is_log_due(args, self.state, self.state.global_step + 1)
        )

    def end_step(self) -> None:
        """An update is over: the safe point."""
        self.state.global_step = self._engine.run_state.updates
        self.state.epoch = self._engine.epochs_done
        if self._counter.counts_tokens:
            self.state.num_input_tokens_seen += self._counter.take_tokens(self._engine.ranks)
        self.fire("on_step_end")
        self.act_on_control()

    def act_on_control(self) -> None:
        """Log, and have the engine evaluate or save, as the control says; in this order."""
        self._engine.run.agree_on_control()
        if self.control.should_log:
            self._log_losses()
            self._engine.run.agree_on_control()
        if self.control.should_evaluate:
            self._engine.request_evaluation()
        elif self.control.should_save:
            self._request_checkpoint()

    def evaluate_as_requested(self) -> None:
        """Evaluate at a safe point, and judge."""
        metrics = self._evaluate(None, self._ignore_keys_for_eval)
        is_best = self._determine_best_metric(metrics)
        if self.args.save_strategy == SaveStrategy.BEST:
            self.control.should_save = is_best
        self._engine.run.agree_on_control()
        if self.control.should_save:
            self._request_checkpoint()

    def save_as_requested(self) -> None:
        """Save at a safe point."""
        self._save_checkpoint(self.model_wrapped, None)
        logger.info("Saved %s", self._checkpoint_folder())
        self.fire("on_save")

    def save_because_of_signal(self) -> None:
        """Save where a signal has stopped the run, if this run has trained anything."""
        has_trained = self.is_in_train and self.state.global_step > self._first_step
        if self._engine.run.stopping.signals.agreed and has_trained and self.args.save_strategy != SaveStrategy.NO:
            self._request_checkpoint()

    def end_training(self) -> None:
        """The run is over, the best weights are loaded; the summary is logged."""
        if self.args.load_best_model_at_end and self.state.best_model_checkpoint is not None:
            self._load_best_model_at_end(Path(self.state.best_model_checkpoint))
        self._take_losses()
        steps = self.state.global_step - self._first_step
        without_loss = math.nan if steps else 0.0
        train_loss = self._loss_total / self._loss_count if self._loss_count else without_loss
        metrics = speed_metrics("train", self._started, num_samples=self._engine.step.samples_used, num_steps=steps)
        self.store_flos()
        metrics["total_flos"] = self.state.total_flos
        metrics["train_loss"] = train_loss
        if self._meter is not None:
            metrics.update(self._init_metrics)
            metrics.update(self._meter.stop())
        self.log(metrics)
        self._delete_superfluous_checkpoints()
        self.fire("on_train_end")
        self._output = TrainOutput(self.state.global_step, train_loss, metrics)

    def _load_best_model_at_end(self, best: Path) -> None:
        try:
            self._load_best_model()
        except InvalidCheckpointError as error:
            reason = str(error) if best.is_dir() else "its folder is gone."
            raise InvalidCheckpointError(
                f"The run is over, but the best model, {best}, cannot be loaded: {reason} The model has the "
                "weights of the last step: write them with `trainer.save_model(...)`. The log history is in "
                "`trainer.state.log_history`."
            ) from error

    def store_flos(self) -> None:
        """Add the operations of the latest batches, over all ranks, to the state. Must be called by all ranks."""
        self.state.total_flos += self._counter.take_flos(self._engine.ranks)

    # -------------------------------------------------------------------------------------------------- checkpoints

    def _checkpoint_folder(self, step: int | None = None) -> Path:
        """Of a step, by default the current one."""
        return self._output_dir / checkpoint_name(self.state.global_step if step is None else step)

    def _request_checkpoint(self) -> None:
        self._engine.save_training_state(self._checkpoint_folder())

    def _note_best_checkpoint(self, folder: Path) -> None:
        """The best model's checkpoint, once there is one: the folder that is about to be written, or an earlier one."""
        if self.state.best_global_step is None:
            return
        best = self._checkpoint_folder(self.state.best_global_step)
        if best == folder or self._engine.ranks.from_first(best.is_dir()):
            self.state.best_model_checkpoint = str(best)

    def _delete_superfluous_checkpoints(self) -> None:
        """At the end a limit of 1 means the best one alone."""
        best, args = self.state.best_model_checkpoint, self.args
        if not (args.should_save and args.load_best_model_at_end and args.save_total_limit == 1 and best is not None):
            return
        for path in sort_checkpoints(self._output_dir):
            if Path(path).resolve() != Path(best).resolve():
                remove_state(Path(path))

    def resume(self, folder: Path) -> None:
        """Take over a checkpoint, now that everything that it belongs to is there."""
        saved = read_trainer_state(folder)
        engine = self._engine
        asked = optimizer_settings(engine.optimizer)
        if holds_run(folder):
            engine.run.load_checkpoint(folder)
            if not is_ours(self._load_from_checkpoint):  # which may know of more than our parts
                self._load_from_checkpoint(str(folder))
        else:
            take_over_foreign(engine, folder, saved.global_step)
        warn_about_settings(engine, asked)
        take_over_state(self, saved)  # type: ignore[arg-type]  # as above
        if self.args.ignore_data_skip:
            engine.run_state.samples_in_epoch = engine.run_state.batches_in_epoch = 0
        if engine.run_state.is_evaluation_due:
            self.control.should_save = self.args.save_strategy != SaveStrategy.NO

    def _find_checkpoint(self, source: str | bool | None) -> Path | None:
        """What to go on from, the same for all ranks."""
        ranks = self._engine.ranks
        if source is None or source is False:
            agree_on_resuming(None, ranks)
            return None
        if not source or not isinstance(source, (bool, str, PathLike)):
            raise ArgumentTypeError(
                f"`resume_from_checkpoint` is {source!r}, which is no path. Give that of a checkpoint, True for the "
                "last one in `output_dir`, or None to begin."
            )
        agree_on_resuming(self._output_dir if source is True else Path(source), ranks)
        return ranks.do_on_first(lambda: find_checkpoint(source, self._output_dir))

    def _exportables(self) -> list[Any]:
        """Whatever has a state that is saved in ``trainer_state.json``."""
        parts = [*self.callback_handler.callbacks, self.control]
        return [part for part in parts if callable(getattr(part, "state", None)) and hasattr(part, "from_state")]

    # -------------------------------------------------------------------------------------------------- small things

    def is_local_process_zero(self) -> bool:
        """Whether this is the first process of its machine."""
        return self.args.local_process_index == 0

    def is_world_process_zero(self) -> bool:
        """Whether this is the first process of all."""
        return self.args.process_index == 0

    def _new_state(self) -> TrainerState:
        return TrainerState(
            is_local_process_zero=self.args.local_process_index == 0,
            is_world_process_zero=self.args.process_index == 0,
            stateful_callbacks=exported_states(self._exportables()),
        )

    def _seed(self) -> None:
        (enable_full_determinism if self.args.full_determinism else set_seed)(self.args.seed)

    def _memory_meter(self, stage: str) -> MemoryMeter | None:
        return None if self.args.skip_memory_metrics else MemoryMeter(stage)

    @property
    def _output_dir(self) -> Path:
        return Path(str(self.args.output_dir))  # its default is filled in by the arguments

    @property
    def _main_input_name(self) -> str:
        return str(getattr(self.model, "main_input_name", "input_ids"))

    @property
    def counts_items(self) -> bool:
        """Whether the loss is told the number of labels in an update."""
        return self.compute_loss_func is not None or self.model_accepts_loss_kwargs

    def count_items(self, batch: Any) -> int | None:
        """The labels in a batch that count, None if it has none."""
        labels = batch.get("labels") if isinstance(batch, Mapping) else None
        return int((labels != PADDING).sum()) if isinstance(labels, torch.Tensor) else None

    def close_displays(self) -> None:
        """An exception ends the run, which no event of the callbacks tells of."""
        for callback in self.callback_handler.callbacks:
            close = getattr(callback, "close", None)
            if callable(close) and is_ours(callback):
                close()

    # -------------------------------------------------------------------------------------------------- losses

    def _log_losses(self) -> None:
        """Log the mean loss of the steps since the last log, if there were any."""
        steps = self.state.global_step - self._last_logged_step
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
        # An overridden `log` need not know of the other argument where nothing comes of it.
        self.log(logs, *([self._started] if self._counter.counts_tokens else []))

    def _take_losses(self) -> tuple[float, int]:
        """The mean loss of the steps since this was last called, and how many of them were left out of it.

        Warns of the latter. Must be called by all ranks.
        """
        tracker, ranks = self._engine.run.losses, self._engine.ranks
        steps = self.state.global_step - self._last_logged_step
        total, count = ranks.sum([tracker.total_loss, tracker.running_count])
        tracker.reset()
        self._last_logged_step = self.state.global_step
        self._loss_total += total
        self._loss_count += count
        left_out = math.ceil(steps - count / ranks.count)
        if left_out:
            warn_user(
                self._engine.ranks,
                f"{left_out} of the last {steps} losses were NaN or infinite (up to step {self.state.global_step}). "
                "The logged mean leaves them out, because of `logging_nan_inf_filter`; the weights may be spoilt "
                "all the same. Lower the learning rate, or look for bad rows.",
            )
        # Without any that counts, the mean of the run so far stands for them.
        total, count = (total, count) if count else (self._loss_total, self._loss_count)
        return (total / count if count else math.nan), left_out

    # ------------------------------------------------------------------------------------------------ the best

    def _determine_best_metric(self, metrics: dict[str, float], trial: Any = None) -> bool:
        """Note the metric if it is better than ever. Returns whether it is.

        Raises:
            MissingMetricError: a KeyError, if ``metric_for_best_model`` is not among `metrics`.
        """
        name = self.args.metric_for_best_model
        if name is None:
            return False
        value = metric_of(metrics, name)
        if math.isnan(value):
            warn_user(
                self._engine.ranks,
                f"`metric_for_best_model`, {name!r}, is NaN at step {self.state.global_step}, so this is not the best "
                "model whatever others are. Look at the evaluation set, and at the logged losses for NaN.",
            )
        best = self.state.best_metric
        sign = 1 if self.args.greater_is_better else -1
        if math.isnan(value) or (best is not None and not sign * value > sign * best):
            return False
        self.state.best_metric, self.state.best_global_step = value, self.state.global_step
        return True

    # ------------------------------------------------------------------------------------- what the trainer provides

    def floating_point_ops(self, inputs: Mapping[str, Any]) -> float:
        raise NotImplementedError

    def _evaluate(
        self, trial: Any, ignore_keys_for_eval: Sequence[str] | None, skip_scheduler: bool = False
    ) -> dict[str, float]:
        raise NotImplementedError

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        raise NotImplementedError

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        raise NotImplementedError

    def _load_best_model(self) -> None:
        raise NotImplementedError

    def log(self, logs: dict[str, Any], start_time: float | None = None) -> None:
        raise NotImplementedError


def metric_of(metrics: dict[str, float], name: str) -> float:
    """A metric of an evaluation, whose name may lack its prefix.

    Raises:
        MissingMetricError: a KeyError; names those that there are.
        HookOutputError: if it is no number.
    """
    name = name if name.startswith("eval_") else f"eval_{name}"
    if name not in metrics:
        raise MissingMetricError(
            f"`metric_for_best_model` is {name!r}, which the evaluation does not have. There is: "
            f"{', '.join(map(repr, metrics))}. Choose one of these, or return it from `compute_metrics`."
        )
    if not isinstance(metrics[name], numbers.Real):
        raise HookOutputError(
            f"`metric_for_best_model` is {name!r}, but the evaluation has {metrics[name]!r} there, which is no number, "
            "so none is the best. Choose another metric, or return a number from `compute_metrics`."
        )
    return metrics[name]
