"""The loop, written once: what happens in a run, and in which order.

Read `_run_training`, `_run_epoch`, `_run_train_epoch` and `_run_update` first. The hooks that they call are in
`hooks.py`, and how events are fired and runs are stopped in `control.py`; `docs/events.md` has the order of hooks and
events for every way a run can end.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pytorch_accelerated.callbacks.handler import CallbackHandler
from pytorch_accelerated.callbacks.watching import WatchedMetric
from pytorch_accelerated.data.batch_size import batch_size_of
from pytorch_accelerated.data.checking import empty_loader_error
from pytorch_accelerated.data.resuming import SavedData
from pytorch_accelerated.data.updates import CountItems, MicroBatch, Round, RunLoader, Update
from pytorch_accelerated.errors import DataError, HookOutputError, StopTrainingError
from pytorch_accelerated.models.sharding import own_parts, whole
from pytorch_accelerated.prediction.collecting import PredictionCollector
from pytorch_accelerated.seeding import generator_states, restore_generator_states
from pytorch_accelerated.steps.guarded import RollBack, UpdateGuard
from pytorch_accelerated.tracking.history import RunHistory
from pytorch_accelerated.tracking.loss import LossTracker
from pytorch_accelerated.tracking.timing import EpochClock
from pytorch_accelerated.training.control import RunControl
from pytorch_accelerated.training.error_notes import note_failure
from pytorch_accelerated.training.hook_output import adding_nothing, loss_and_size
from pytorch_accelerated.training.late_counts import LateCounts
from pytorch_accelerated.training.run_state import RunPhase
from pytorch_accelerated.training.settings import TrainSettings

if TYPE_CHECKING:
    from pytorch_accelerated.steps.capturing import CapturedStep
    from pytorch_accelerated.steps.splitting import BatchSplitter

# Losses are read this often. A number of updates, not of seconds: sums of a resumed run must be cut at the same places.
UPDATES_BETWEEN_READINGS = 64

_HOOKS_OF_UPDATE = (
    "_perform_forward_and_backward_passes",
    "_update_loss_tracker",
    "_clip_gradients",
    "backward_step",
    "optimizer_step",
    "scheduler_step",
    "optimizer_zero_grad",
)


class TrainingLoop(RunControl):
    """Runs the hooks and fires the events; `Trainer` gives it what it needs."""

    run_history: RunHistory
    custom_events: tuple[str, ...]
    inference_mode: bool
    _accumulating: Callable[[], contextlib.AbstractContextManager[Any]]
    _train_dataloader: Any
    _loss_tracker: LossTracker
    _gradient_norms: LossTracker
    _epochs_before_run: int
    _steps_scheduler_per_update: bool

    def _reset_control(self) -> None:
        super()._reset_control()
        self._update_guard: UpdateGuard | None = None
        self._resumed_data: Mapping[str, SavedData] | None = None
        self._splitter: BatchSplitter | None = None
        self._captured_step: CapturedStep | None = None
        self._is_sharded = False
        self._round_has_empty_rank = False
        self._gathers_no_rows = False
        self._late_counts = LateCounts(self._ranks)
        self._count_items: CountItems | None = None
        self._stops_after_each_update = True
        self._epoch_clock = EpochClock(1)
        self._update = Update((), samples=0)
        self._micro_batch = MicroBatch(None, 1.0, is_last=True, is_borrowed=False, has_empty_rank=False)

    def _run_training(self) -> None:
        """Epoch after epoch, until the run is complete or something stops it."""
        self._defers_saves = True
        with self._ending("training_run_end", "on_training_run_end"):
            self._moment("training_run_start", "on_training_run_start")
            self._act_on_requests()
            self._stop_if_asked()
            while not self._is_run_complete():
                if self.run_state.phase is RunPhase.EPOCH_CLOSED:
                    self.run_state.start_epoch()
                try:
                    self._run_epoch()
                except RollBack as request:
                    request.guard.roll_back()

    def _run_epoch(self) -> None:
        """One epoch and its evaluation; after a resume, what of it is still due."""
        state = self.run_state
        if state.phase is RunPhase.TRAINING:
            if isinstance(self._train_dataloader, RunLoader):  # a subclass may iterate over it without `_updates`
                self._train_dataloader.set_epoch(self._data_epoch)
            self._run_train_epoch(self._train_dataloader)
            self._close(RunPhase.TRAINING_EPOCH_CLOSED)
        if state.phase is RunPhase.TRAINING_EPOCH_CLOSED:
            if self._eval_dataloader is not None:
                self._run_eval_epoch(self._eval_dataloader)
            self._step_scheduler_after_epoch()
            self._close(RunPhase.EVALUATED)
        self._moment("training_run_epoch_end", "on_training_run_epoch_end")
        state.finish_epoch()
        self.run_history._increment_epoch()
        self._close(RunPhase.EPOCH_CLOSED)

    def _run_train_epoch(self, train_dl: Any) -> None:
        """One pass over the training data, or what is left of it."""
        self._moment("train_epoch_start", "on_train_epoch_start")
        self._act_on_requests()
        self._stop_if_asked()
        self._stops_after_each_update = self._ranks.any(self._has_stoppers())
        self._epoch_clock = EpochClock(self.run_history.current_epoch)
        for update in itertools.islice(self._updates(train_dl), self._updates_left):
            self._run_update(update)
            self._act_at_safe_point()
        if self.run_state.updates_in_epoch == 0:
            self._refuse_empty_epoch(train_dl)
        self._loss_tracker.read()
        self.run_history.add_timing(self._epoch_clock.read())
        self._report_non_finite("train_loss_epoch")
        self._guarded(self.train_epoch_end)
        self._add_epoch_loss_to_run_history("train_loss_epoch")
        if self._settings.gradient_clip_norm is not None:
            self.run_history.update_metric("gradient_norm", self._gradient_norms.average)
            self._gradient_norms.reset()
        if self._update_guard is not None:
            self._update_guard.record()
        if self._splitter is not None:
            self._splitter.record()
        self._fire("on_train_epoch_end")

    def _refuse_empty_epoch(self, train_dl: Any) -> None:
        raise empty_loader_error(train_dl, "train on")

    def _run_update(self, update: Update) -> None:
        """One optimizer update from the batches of `update`."""
        acts_at, captured, guard = self.callback_handler.acts_at, self._captured_step, self._update_guard
        if guard is not None and not guard.lets_begin(update):
            return
        self._update = update
        for micro_batch in update.micro_batches:
            self._micro_batch = micro_batch
            if micro_batch.is_last:  # ranks exchange gradients in the backward pass of the last batch only
                self._run_batch(micro_batch)
            else:
                with self._accumulating():
                    self._run_batch(micro_batch)
        is_skipped = self._complete_gradients()
        if acts_at["on_optimizer_step_start"]:
            self._fire("on_optimizer_step_start")
        if guard is not None and guard.holds_back(is_skipped=is_skipped):
            is_skipped = True
        elif captured is None:
            self._apply_gradients()
        else:
            captured.apply_gradients()
        if not is_skipped and self._steps_scheduler_per_update:
            self._guarded(self.scheduler_step)
        self._guarded(self.optimizer_zero_grad)
        self.run_state.finish_update(samples=update.samples, skipped=is_skipped)
        self.run_history._finish_update()
        if acts_at["on_optimizer_step_end"]:
            self._fire("on_optimizer_step_end")

    def _run_batch(self, micro_batch: MicroBatch) -> None:
        """The part of an update that one batch is."""
        if micro_batch.is_borrowed:
            self._keep_in_step(micro_batch.batch)
            return
        state, stand_in = self.run_state, self._captured_step or self._splitter
        if micro_batch.has_empty_rank or self.callback_handler.acts_at["on_train_step_start"]:
            self._fire_of_batch("on_train_step_start")
        if stand_in is None:
            self._perform_forward_and_backward_passes(micro_batch.batch, state.batches_in_epoch)
        else:
            stand_in.compute(micro_batch.batch, state.batches_in_epoch)
        state.batches_in_epoch += 1

    def _perform_forward_and_backward_passes(self, batch: Any, step: int) -> None:
        """Add the gradients of one batch. `step` counts batches of this rank in the epoch, from 0."""
        output = self._output_of(self.calculate_train_batch_loss, batch)
        self._report_batch(output, batch, step)
        self._guarded(self.backward_step, self._weighted(output))

    def _report_batch(self, output: Any, batch: Any, step: int) -> None:
        """Tell the loss tracker and the callbacks what became of a batch."""
        loss, size = loss_and_size(output, hook="calculate_train_batch_loss")
        items = self._micro_batch.items
        self._update_loss_tracker(loss, size if items is None else items)
        if self._micro_batch.has_empty_rank or self.callback_handler.acts_at["on_train_step_end"]:
            self._fire_of_batch("on_train_step_end", batch=batch, batch_output=output, step=step)

    def _report_leaves_loss(self, output: Any, batch: Any, step: int) -> bool:
        """`_report_batch`. Returns whether the callbacks have left the loss as it was."""
        loss, _ = loss_and_size(output, hook="calculate_train_batch_loss")
        version = getattr(loss, "_version", None)
        self._report_batch(output, batch, step)
        return output["loss"] is loss and getattr(loss, "_version", None) == version

    def _apply_gradients(self) -> None:
        """Clip the complete gradients, and change the parameters."""
        self._clip_gradients()
        self._guarded(self.optimizer_step)

    def _run_eval_epoch(self, valid_dl: Any, is_training: bool = True, is_intermediate: bool = False) -> None:
        """Evaluate every sample once and record the mean loss.

        Args:
            valid_dl: yields batches.
            is_training: whether this belongs to a training run.
            is_intermediate: whether this happens inside a training epoch.
        """
        metric_name = "evaluation_loss"
        if is_training:
            metric_name = "intermediate_eval_loss" if is_intermediate else "eval_loss_epoch"
        with self._evaluating(restore_modes=is_intermediate):
            self._moment("eval_epoch_start", "on_eval_epoch_start", is_intermediate=is_intermediate)
            self._stop_if_asked()
            rounds = 0
            with self._without_gradients():
                every_round = self._rounds(valid_dl, count_items=self._count_items)
                for rounds, round_ in enumerate(self._until_signal(every_round, StopTrainingError), start=1):
                    self._evaluate_round(round_)
                    if rounds % UPDATES_BETWEEN_READINGS == 0:
                        self._loss_tracker.read()
            if rounds == 0:
                raise empty_loader_error(valid_dl, "evaluate")
            self._loss_tracker.read()
            self._report_non_finite(metric_name)
            self._guarded(self.eval_epoch_end)
            self._add_epoch_loss_to_run_history(metric_name)
            self._fire("on_eval_epoch_end", is_intermediate=is_intermediate)

    def _evaluate_round(self, round_: Round) -> None:
        acts_at, batch = self.callback_handler.acts_at, round_.batch
        if round_.has_empty_rank or acts_at["on_eval_step_start"]:
            self._fire_in_round(round_, "on_eval_step_start")
        output = self._output_in_round(round_, self.calculate_eval_batch_loss)
        if not round_.is_idle:
            loss, size = loss_and_size(output, hook="calculate_eval_batch_loss")
            self._update_loss_tracker(loss, size if round_.items is None else round_.items)
        if round_.has_empty_rank or acts_at["on_eval_step_end"]:
            self._fire_in_round(round_, "on_eval_step_end", batch=batch, batch_output=output)

    def _run_evaluation(self) -> None:
        """The run of `evaluate`."""
        with self._ending("evaluation_run_end", "on_evaluation_run_end"):
            self._moment("evaluation_run_start", "on_evaluation_run_start")
            self._stop_if_asked()
            self._run_eval_epoch(self._eval_dataloader, is_training=False)
            self._stop_if_asked()

    def _run_prediction(self, loader: RunLoader, collector: PredictionCollector) -> Any:
        """What `collector` makes of every batch of `loader`."""
        try:
            with self._evaluating(restore_modes=True):
                self.model.eval()
                self._fire_in_pass("on_prediction_run_start", num_batches=loader.num_batches)
                with self._without_gradients():
                    for round_ in self._until_signal(self._rounds(loader), self._give_up_prediction):
                        self._predict_round(round_, collector)
                self._fire_in_pass("on_prediction_run_end")
        except BaseException:
            collector.abort()
            raise
        return collector.finish()

    def _give_up_prediction(self, reason: str) -> BaseException:
        return self._signals.exit()

    def _predict_round(self, round_: Round, collector: PredictionCollector) -> None:
        predictions = self._output_in_round(round_, self.calculate_predict_batch_outputs)
        samples, rows = batch_size_of(round_.batch), batch_size_of(predictions)
        if not round_.is_idle and samples is not None and rows is not None and rows != samples:
            raise HookOutputError(
                f"`calculate_predict_batch_outputs` returned {rows} rows for a batch of {samples} samples, so nobody "
                "could tell which prediction belongs to which sample. Return one row per sample."
            )
        if not round_.is_idle:
            collector.add(round_.start, predictions)
        self._fire_in_round(round_, "on_prediction_step_end", batch=round_.batch, predictions=predictions)

    def _fire_of_batch(self, event: str, **kwargs: Any) -> None:
        """Fire an event of the current batch; a rank that only borrowed it answers the others' `gather` instead."""
        if self._micro_batch.has_empty_rank:
            self._in_round(self._micro_batch.is_borrowed, True, self._fire, event, **kwargs)
        else:
            self._fire(event, **kwargs)

    def _fire_in_round(self, round_: Round, event: str, **kwargs: Any) -> None:
        self._in_round(round_.is_idle, round_.has_empty_rank, self._fire_in_pass, event, **kwargs)

    def _output_in_round(self, round_: Round, hook: Callable[[Any], Any]) -> Any:
        """What `hook` makes of the batch of a round; None on a rank without one."""
        if not round_.has_empty_rank:
            return self._output_of(hook, round_.batch, round_.start)
        outputs: list[Any] = []
        if self._is_sharded:
            # No rank has a whole model, so all of them go through it together; some with a batch that counts nowhere.
            self._gathers_no_rows = round_.is_idle
            outputs.append(self._output_of(hook, round_.batch, round_.start))
            self._gathers_no_rows = False
        else:
            work = functools.partial(self._output_of, hook, round_.batch, round_.start)
            self._in_round(round_.is_idle, True, lambda: outputs.append(work()))
        return None if round_.is_idle else outputs[0]

    def _in_round(
        self, is_idle: bool, has_empty_rank: bool, work: Callable[..., None], *args: Any, **kwargs: Any
    ) -> None:
        """Do this rank's part of a round; a rank without a batch answers the others' `gather` instead."""
        self._round_has_empty_rank = has_empty_rank
        try:
            if not is_idle:
                work(*args, **kwargs)
        finally:
            self._round_has_empty_rank = False
        if has_empty_rank:
            self._ranks.finish_round(is_idle=is_idle)

    # ----------------------------------------------------------------------------------------- the parts of an update

    def _output_of(self, hook: Callable[[Any], Any], batch: Any, start: int | None = None) -> Any:
        """What `hook` makes of a batch."""
        try:
            return hook(batch)
        except StopTrainingError as error:
            if self._ranks.count == 1:
                raise
            # The other ranks wait for what would be made from it: gradients, or what their callbacks gather.
            raise HookOutputError(
                f"`{getattr(hook, '__name__', hook)}` raised StopTrainingError on rank {self._ranks.index} of "
                f"{self._ranks.count}, before it returned what the other ranks wait for. Raise it in the event after "
                "it, or later."
            ) from error
        except Exception as error:
            self._note_failure(error, hook, batch, start)
            raise

    def _note_failure(
        self, error: Exception, hook: Callable[..., Any], batch: Any = None, start: int | None = None
    ) -> None:
        """Note on an error what was being done with which batch. `start` is that of a round; without: in an update."""
        name = getattr(hook, "__name__", "")
        if batch is None and name not in ("backward_step", "optimizer_step"):
            return
        state = self.run_state
        number = state.batches_in_epoch - (name == "optimizer_step")  # whose batches have been counted
        position = f"update {state.updates + 1} of the run, batch {number} of the epoch on this rank"
        if start is not None:
            position = f"after {state.updates} updates of the run, the batch that begins with sample {start}"
        note_failure(
            error,
            hook=name,
            batch=self._micro_batch.batch if batch is None else batch,
            position=f"epoch {self.run_history.current_epoch}, {position} (counted from 0)",
            rank=self._ranks.index,
            ranks=self._ranks.count,
        )

    def _keep_in_step(self, batch: Any) -> None:
        """A forward and backward pass that counts nowhere, on a rank that has no samples left in this update."""
        self._fire_of_batch("on_train_step_start")
        self._gathers_no_rows = True
        output = self._output_of(self.calculate_train_batch_loss, batch)
        self._gathers_no_rows = False
        loss, _ = loss_and_size(output, hook="calculate_train_batch_loss")
        self._fire_of_batch("on_train_step_end")
        self.backward_step(adding_nothing(loss))
        if self._is_counted_late(output):
            self._late_counts.add(0, self._update.samples)

    def _weighted(self, output: Mapping[str, Any]) -> Any:
        """The loss times its share of the update, as far as it is known; see `_complete_gradients` for the rest."""
        loss: Any = output["loss"]
        weight: Any = self._micro_batch.weight
        # Nearly all hooks count nothing. The first batch settles that, and is looked at more closely for it.
        is_plain = weight is not None and self._late_counts.hook_counts is False
        if not (is_plain and output.get("num_items_in_batch") is None) and self._is_counted_late(output):
            count = output.get("num_items_in_batch")
            weight = self._late_counts.add(output["batch_size"] if count is None else count, self._update.samples)
            if isinstance(weight, torch.Tensor):
                return loss * weight.to(device=loss.device, dtype=loss.dtype)
        if weight == 1:
            return loss
        return loss * weight if weight else adding_nothing(loss)

    def _is_counted_late(self, output: Mapping[str, Any]) -> bool:
        """Whether the weight of the current batch follows from what the hook returned for it."""
        counts = self._late_counts.check(output)
        return self._micro_batch.weight is None or (counts and self._micro_batch.items is None)

    def _complete_gradients(self) -> bool:
        """Bring the gradients to their true size. Returns whether fp16 found them infinite, so nothing will change."""
        is_skipped = False
        if self._accelerator.scaler is not None:
            self._accelerator.unscale_gradients(self.optimizer)
            raw = getattr(self.optimizer, "optimizer", self.optimizer)
            found = self._accelerator.scaler._found_inf_per_device(raw)
            is_skipped = any(flag.item() for flag in found.values())  # the one documented read of fp16
        if not self._late_counts.is_agreed:
            self._late_counts.agree()
        if self._late_counts.counts:
            factor = self._late_counts.take_factor()
            gradients = own_parts(parameter.grad for parameter in self._parameters() if parameter.grad is not None)
            if gradients:
                torch._foreach_mul_(gradients, factor)
        return is_skipped

    def _clip_gradients(self) -> None:
        """Limit the complete gradient, once per update."""
        if not self._settings.clips_gradients:
            return
        norm = clip_gradients(self._parameters(), self._settings)
        if norm is not None:
            self._gradient_norms.update(norm)

    def _parameters(self) -> list[torch.Tensor]:
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]

    def _step_scheduler_after_epoch(self) -> None:
        """Step schedulers that count epochs, or watch a metric."""
        if isinstance(self.scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
            metric = WatchedMetric(self._settings.scheduler_metric)
            self.scheduler.step(metric.latest(self))  # type: ignore[arg-type]  # the loop is always a Trainer's
        elif self._settings.step_scheduler == "epoch":
            self.scheduler_step()

    def _update_loss_tracker(self, batch_loss: torch.Tensor, batch_size: Any) -> None:
        """Take a batch's mean loss into the epoch's. Does not wait for the device."""
        self._loss_tracker.update(batch_loss, batch_size)

    def _report_non_finite(self, metric_name: str) -> None:
        """Tell the callbacks, on all ranks, if a loss that has been read on any of them is not finite."""
        first_bad = self._loss_tracker.first_non_finite
        everyones = self._ranks.exchange_numbers([-1 if first_bad is None else first_bad])
        steps = [step for (step,) in everyones if step >= 0]
        if steps:
            self._loss_tracker.first_non_finite = None
            epoch = self.run_history.current_epoch
            self._emit("on_non_finite_loss", metric_name=metric_name, epoch=epoch, step=min(steps))

    def _add_epoch_loss_to_run_history(self, metric_name: str) -> None:
        """Record the mean loss per item over all ranks, and begin a new mean."""
        tracker = self._loss_tracker
        total, count, batches = self._ranks.sum([tracker.total_loss, tracker.running_count, tracker.batches_read])
        if batches and not count and not tracker.leaves_out_non_finite:
            raise DataError(
                f"None of the {batches:.0f} batches has any items, so there is no mean loss to record as "
                f"{metric_name!r}. Look at what `count_batch_items` or 'num_items_in_batch' says of the data."
            )
        self.run_history.update_metric(metric_name, total / count if count else tracker.average)
        tracker.reset()

    # ----------------------------------------------------------------------------------- safe points, and the run's end

    def _act_at_safe_point(self) -> None:
        """Between two updates, where everything is consistent: read losses, act on requests, stop."""
        if self.run_state.updates_in_epoch % UPDATES_BETWEEN_READINGS == 0:
            self._loss_tracker.read()
            self._gradient_norms.read()
            self._report_non_finite("train_loss_epoch")
        if self._evaluation_requested or self._requested_states:
            self._loss_tracker.look_for_non_finite()
            self._report_non_finite("train_loss_epoch")
            with self._epoch_clock.paused():
                self._act_on_requests()
        if self._ranks.count == 1 or self._stops_after_each_update or self._stop_pace.is_due(self.run_state.updates):
            self._stop_if_asked()

    def _close(self, phase: RunPhase) -> None:
        """Note that a part of the epoch is over, after its last callback; then act and stop as asked."""
        self.run_state.phase = phase
        self._act_on_requests()
        self._stop_if_asked()

    def _has_stoppers(self) -> bool:
        """Whether something on this rank may want to stop between two batches: any callback or hook of the user's.

        Where there is nothing like it, ranks agree now and then only. Callbacks of this library declare it.
        """
        has_own_hook = any(getattr(type(self), hook) is not getattr(TrainingLoop, hook) for hook in _HOOKS_OF_UPDATE)
        return has_own_hook or self.callback_handler.ranks_agree_after_each_update()

    @property
    def _updates_left(self) -> int | None:
        """Until `max_num_train_steps`, if it is set; none where a run is resumed right behind the last one."""
        limit = self._settings.max_num_train_steps
        return None if limit is None else min(max(0, limit - self.run_state.updates), sys.maxsize)

    def _is_run_complete(self) -> bool:
        if self._settings.max_num_train_steps is not None:
            return self.run_state.phase is RunPhase.EPOCH_CLOSED and self._updates_left == 0
        assert self._settings.num_epochs is not None
        return self.run_state.epochs >= self._settings.num_epochs

    @property
    def is_last_epoch(self) -> bool:
        """Whether the training run ends, as far as can be told, when the current epoch is over."""
        if self._settings.max_num_train_steps is not None:
            return self._updates_left == 0
        return self.run_state.epochs + 1 >= (self._settings.num_epochs or 1)

    # ----------------------------------------------------------------------------------------------- data of the loop

    @property
    def _data_epoch(self) -> int:
        """What the order of the samples is made from: epochs of this run and of those that it goes on from."""
        return self._epochs_before_run + self.run_state.epochs

    def _updates(self, train_dl: Any) -> Iterator[Update]:
        """The updates of the current epoch that are still due."""
        loader = self._adapted(train_dl, self._train_dl_kwargs)  # it may have been put in place since the run started
        state = self.run_state
        loader.set_epoch(self._data_epoch)
        self._epoch_clock.watch(loader.waiting)
        return loader.updates(
            start=state.samples_in_epoch, batches_done=state.batches_in_epoch, count_items=self._count_items
        )

    def _rounds(self, eval_dl: Any, count_items: CountItems | None = None) -> Iterator[Round]:
        loader = self._adapted(eval_dl, self._eval_dl_kwargs)
        return loader.rounds(borrows=self._is_sharded, count_items=count_items)

    def _without_gradients(self) -> contextlib.AbstractContextManager[Any]:
        return torch.inference_mode() if self.inference_mode else torch.no_grad()

    @contextlib.contextmanager
    def _evaluating(self, *, restore_modes: bool) -> Iterator[None]:
        """The model without its wrapper, which would wait for ranks that have no batch; a loss tracker of its own."""
        wrapped, tracker = self.model, self._loss_tracker
        if isinstance(wrapped, DistributedDataParallel):
            self.model = wrapped.module
        if self._ranks.count > 1:
            # Each rank has kept its own batch statistics.
            self._ranks.copy_from_first(list(self.model.buffers()))
        modes = [(module, module.training) for module in self.model.modules()] if restore_modes else []
        self._loss_tracker = LossTracker()
        generators = generator_states()
        try:
            yield
        except StopTrainingError:
            restore_generator_states(generators)  # a resumed run repeats what is given up here
            raise
        finally:
            for module, is_training in modes:
                module.training = is_training
            self.model, self._loss_tracker = wrapped, tracker

    def _evaluate_other_model(
        self, model: nn.Module, *, metric_name_prefix: str, callbacks: Iterable[Any] = ()
    ) -> None:
        """Evaluate `model` in place of the trainer's own, for callbacks in `on_eval_epoch_end`. All ranks must call it.

        Args:
            model: on the trainer's device.
            metric_name_prefix: of everything that is recorded meanwhile.
            callbacks: those whose events are fired meanwhile.
        """
        own_model, own_handler, own_prefix = self.model, self.callback_handler, self.run_history.metric_name_prefix
        self.model = model
        self.callback_handler = CallbackHandler(callbacks, custom_events=self.custom_events)
        self.run_history.set_metric_name_prefix(metric_name_prefix)
        try:
            with self._finishing_passes():
                self._run_eval_epoch(self._eval_dataloader)
        finally:
            self.model, self.callback_handler = own_model, own_handler
            self.run_history.set_metric_name_prefix(own_prefix)

    # ---------------------------------------------------------------------------------------- what the trainer provides

    def _adapted(self, loader: Any, dl_kwargs: Mapping[str, Any] | None) -> RunLoader:
        raise NotImplementedError


def clip_gradients(parameters: list[torch.Tensor], settings: TrainSettings) -> torch.Tensor | None:
    """Limit gradients as the settings say. Returns their norm before, if it is limited. Never waits for the device."""
    if settings.gradient_clip_value is not None:
        torch.nn.utils.clip_grad_value_(parameters, settings.gradient_clip_value)
    elif settings.gradient_clip_norm is not None:
        norm: torch.Tensor = whole(torch.nn.utils.clip_grad_norm_(parameters, settings.gradient_clip_norm))
        return norm
    return None
