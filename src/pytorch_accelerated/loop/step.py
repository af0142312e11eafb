"""An update, written once: forward, report, weigh, backward, complete, clip, apply.

Read `Step.add`, `Step.compute` and `Step.apply` first. Subclasses in `guarded.py`, `variants.py` and `lanes.py` replace
a part; `Training.kind_of_step` chooses one, once, when the run is created. Hooks are looked up whenever they are
called, so that a callback may replace one within the run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from pytorch_accelerated.data.updates import MicroBatch
from pytorch_accelerated.errors import StopTrainingError
from pytorch_accelerated.loop.context import Context
from pytorch_accelerated.loop.hook_output import LateCounts, adding_nothing, loss_and_size
from pytorch_accelerated.ranks.compat.torch import found_infinite, scale_all
from pytorch_accelerated.ranks.held import held_parts, trained_outside
from pytorch_accelerated.ranks.numerics import clip_norm
from pytorch_accelerated.ranks.sharding import own_parts
from pytorch_accelerated.record.warning import warn_user

# The owner and the name of something that an update calls.
Call = tuple[object, str]

_NO_BATCH = MicroBatch(None)


class Step:
    """Computes the updates of a training run.

    Args:
        context: of the run, whose model is prepared.
        own: the user's own versions of `_perform_forward_and_backward_passes`, `_clip_gradients` and
            `_update_loss_tracker`, as far as there are any.
        steps_scheduler: whether the scheduler steps after each update.

    Attributes:
        micro_batch: the current batch.
        backward_began: when its backward pass began, by `time.perf_counter`; None in passes of the user's own.
        limit: the limit of the gradient's norm; None: there is none, or what is called to apply the update clips.
        calls: what applies an update, in order: ``calls[True]`` if fp16 skips it, else ``calls[False]``.
    """

    #: Whether `complete_gradients` has something to do in every update. A subclass that changes gradients sets it.
    _always_completes_gradients = False

    def __init__(
        self, context: Context, own: Mapping[str, Callable[..., Any]] | None = None, *, steps_scheduler: bool = False
    ) -> None:
        own = dict(own or {})
        self.context, self.asked, self.parts, self.control = context, context.asked, context.parts, context.control
        self.reports = context.parts.reports
        self.micro_batch = _NO_BATCH
        self.backward_began: float | None = None
        mean_is_over = 1 if context.asked.given.lanes else context.parts.ranks.count
        self.late_counts = LateCounts(context.parts.ranks, mean_is_over=mean_is_over)
        self._checks_size = True
        self.limit: Any = context.asked.settings.gradient_clip_norm
        # The trainer's own `_perform_forward_and_backward_passes` only calls `compute`: without an override, so do we.
        self._compute: Callable[[Any, int], None] = own.get("_perform_forward_and_backward_passes", self.compute)
        self._record: Callable[..., None] = own.get("_update_loss_tracker", context.parts.reports.losses.update)
        self._clips = "_clip_gradients" in own or context.asked.settings.clips_gradients
        if context.parts.accelerator.scaler is not None:
            self._always_completes_gradients = True
        scheduling: list[Call] = [(context.trainer, "scheduler_step")] if steps_scheduler else []
        discarding: Call = (context.trainer, "optimizer_zero_grad")
        # Two lists, by whether fp16 skips the update. The optimizer's step is called in both, because the scaler acts
        # inside of it; the schedule must not advance for an update that changed nothing.
        self.calls: dict[bool, list[Call]] = {
            False: [*self.applying(), *scheduling, discarding],
            True: [*self.applying(), discarding],
        }

    def add(self, micro_batch: MicroBatch) -> None:
        """Add the gradients of one batch of an update; `MicroBatch` says what is known of it."""
        parts = self.parts
        self.micro_batch, self.backward_began = micro_batch, None
        # With an empty rank, always: it answers the `gather` calls of the others until all have emitted the event.
        if micro_batch.has_empty_rank or parts.callbacks.acts_at["on_train_step_start"]:
            self.emit_of_batch("on_train_step_start")
        compute = self.compute if micro_batch.is_borrowed else self._compute
        if micro_batch.is_last:  # ranks exchange gradients in the backward pass of the last batch only
            compute(micro_batch.batch, parts.state.batches_in_epoch)
        else:
            with parts.prepared.accumulating():  # type: ignore[union-attr]  # it is prepared while it trains
                compute(micro_batch.batch, parts.state.batches_in_epoch)
        parts.state.batches_in_epoch += not micro_batch.is_borrowed

    def apply(self) -> None:
        """Apply the update, whose gradients are complete."""
        # Usually the gradients have their true size, because each loss was multiplied by its share. What may be left:
        # fp16's scale, item counts that came with the outputs, and on multiple ranks parameters outside of the model.
        is_skipped = (self._always_completes_gradients or self.late_counts.are_pending) and self.complete_gradients()
        if self.parts.callbacks.acts_at["on_optimizer_step_start"]:
            self.control.emitter.emit("on_optimizer_step_start")
        self.finish(self.calls[is_skipped], is_skipped=is_skipped)

    def compute(self, batch: Any, step: int) -> None:
        """Forward, report, weigh, backward. A request to stop in the backward pass is deferred.

        Args:
            batch: the batch, on the trainer's device.
            step: the number of this rank's earlier batches in the epoch.
        """
        trainer, emitter, micro_batch = self.context.trainer, self.control.emitter, self.micro_batch
        hook = trainer.calculate_train_batch_loss
        # The loader knows how many samples the batch has, even where no tensor shows it, as for graphs. If an override
        # passes on only a part of the batch, the number is no longer true.
        trainer._batch_samples = micro_batch.samples if batch is micro_batch.batch else None
        try:
            output = hook(batch)
        except Exception as error:
            emitter.explain(error, hook, batch)
            raise
        finally:
            trainer._batch_samples = None
        loss, size = loss_and_size(output, hook="calculate_train_batch_loss")
        if not micro_batch.is_borrowed:  # a borrowed sample is recorded with the batch that it belongs to
            weight = self.reports.batch_weight = size if micro_batch.items is None else micro_batch.items
            self._record(loss, weight)
        if micro_batch.has_empty_rank or self.parts.callbacks.acts_at["on_train_step_end"]:
            self.emit_of_batch("on_train_step_end", batch=batch, batch_output=output, step=step)
        # Nearly all hooks return no 'num_items_in_batch'. Whether this one does is decided by its first batch.
        is_counted = self.late_counts.hook_counts is not False or output.get("num_items_in_batch") is not None
        share = self.weigh(output) if is_counted or micro_batch.weight != 1 else output["loss"]
        backward = trainer.backward_step
        self.backward_began = time.perf_counter()
        try:
            backward(share)
        except StopTrainingError as request:
            emitter.stop_request = emitter.stop_request or request
        except Exception as error:
            emitter.explain(error, backward, micro_batch.batch)
            raise

    def emit_of_batch(self, event: str, **kwargs: Any) -> None:
        """Emit an event of the current batch."""
        self.control.emitter.emit(event, **kwargs)

    def weigh(self, output: Mapping[str, Any]) -> Any:
        """The loss times its share of the update, as far as that is known; `complete_gradients` does the rest."""
        loss: Any = output["loss"]
        weight: Any = self.micro_batch.weight
        # A batch counts by its part of the update over all ranks, so gradients add up to those of one large batch.
        if self.is_counted_late(output):
            count = output.get("num_items_in_batch")
            count = output["batch_size"] if count is None else count
            weight = self.late_counts.add(count, self.micro_batch.update.samples)
            if isinstance(weight, torch.Tensor):
                return loss * weight.to(device=loss.device, dtype=loss.dtype)
        elif self._checks_size and weight != 1:
            self._check_size(output["batch_size"])
        if weight == 1:
            return loss
        # Without items, the mean is 0 / 0, and NaN times 0 is NaN: `adding_nothing` gives a loss of exactly 0.
        return loss * weight if weight else adding_nothing(loss)

    def _check_size(self, size: Any) -> None:
        """Warn once if a hook says that its loss is the mean of other rows than those by which it is weighed."""
        rows = self.micro_batch.samples
        if type(size) is int and self.micro_batch.items is None and rows not in (None, size):
            self._checks_size = False
            warn_user(
                self.parts.ranks,
                f"`calculate_train_batch_loss` returned {size} as 'batch_size' for a batch of {rows} rows. That counts "
                "in the recorded loss, but gradients are weighted by rows. If the loss is a mean over something else, "
                "return the number as 'num_items_in_batch', for every batch.",
            )

    def is_counted_late(self, output: Mapping[str, Any]) -> bool:
        """Whether the weight of the current batch depends on the hook's output."""
        counts = self.late_counts.check(output)
        return self.micro_batch.weight is None or (counts and self.micro_batch.items is None)

    def complete_gradients(self) -> bool:
        """Scale the gradients to their true size, if something is left to be done for that.

        Returns:
            Whether fp16 found them infinite, so that nothing will change.
        """
        is_skipped = False
        accelerator, optimizer = self.parts.accelerator, self.parts.optimizer
        if accelerator.scaler is not None:
            accelerator.unscale_gradients(optimizer)
            # The only time per update that fp16 waits for the device.
            is_skipped = found_infinite(accelerator.scaler, getattr(optimizer, "optimizer", optimizer))
        if self.late_counts.are_pending:
            factor = self.late_counts.take_factor()
            if factor is not None:
                scale_all(own_parts(each.grad for each in self.parameters() if each.grad is not None), factor)
        return is_skipped

    def finish(self, calls: Sequence[Call], *, is_skipped: bool) -> None:
        """Update the parameters, step the scheduler, discard the gradients, and count the update.

        When it returns, the run is at a safe point: it can be saved, stopped and resumed there.

        Args:
            calls: what to call. A request to stop is deferred.
            is_skipped: whether nothing changes: fp16 found infinite gradients, or a `GuardedStep` undid the update.
        """
        parts, emitter, update = self.parts, self.control.emitter, self.micro_batch.update
        for owner, name in calls:
            hook = getattr(owner, name)
            try:
                hook()
            except StopTrainingError as request:
                emitter.stop_request = emitter.stop_request or request
            except Exception as error:
                emitter.explain(error, hook, self.micro_batch.batch)
                raise
        state = parts.state
        # The counts change right after the weights, before the event, so a callback sees this update counted.
        state.updates += 1
        state.updates_in_epoch += 1
        state.samples_in_epoch += update.samples
        state.samples += update.samples
        state.items += 0 if update.items is None else update.items[1]  # over all ranks
        state.skipped_updates += is_skipped
        parts.history.updates_done += 1
        if parts.callbacks.acts_at["on_optimizer_step_end"]:
            emitter.emit("on_optimizer_step_end")

    def applying(self) -> list[Call]:
        """The calls that apply the update, in order."""
        trainer = self.context.trainer
        return [*([(trainer, "_clip_gradients")] if self._clips else []), (trainer, "optimizer_step")]

    def clip(self) -> None:
        """Clip the complete gradient according to the settings. Does not wait for the device."""
        settings = self.asked.settings
        if settings.gradient_clip_value is not None:
            torch.nn.utils.clip_grad_value_(self.parameters(), settings.gradient_clip_value)
        elif self.limit is not None:
            self.reports.gradient_norms.update(self.clip_norm(self.limit))

    def note_norm(self, norm: torch.Tensor, *, is_skipped: bool) -> None:
        """Record the norm of a gradient that an engine has clipped; for a skipped update it counts nowhere."""
        if self.asked.settings.gradient_clip_norm is not None:
            self.reports.gradient_norms.update(norm, 1 - is_skipped)

    def clip_norm(self, limit: Any) -> torch.Tensor:
        """Clip the norm of the gradient, or of each of multiple optimizers' gradients. Returns the norm before."""
        if not isinstance(limit, (Mapping, list, tuple)):
            return clip_norm(self.parameters(), limit)
        optimizers = getattr(self.parts.optimizer, "optimizer", self.parts.optimizer)
        norms = [
            clip_norm([each for group in optimizers[name].param_groups for each in group["params"]], most)
            for name, most in (limit.items() if isinstance(limit, Mapping) else enumerate(limit))
            if most is not None
        ]
        norm: torch.Tensor = torch.linalg.vector_norm(torch.stack(norms))
        return norm

    def release(self) -> None:
        """Drop the references to the last batch."""
        self.micro_batch = _NO_BATCH

    def parameters(self) -> list[torch.Tensor]:
        """The parameters of the optimizer; if the user steps others instead, all that they may train."""
        # The optimizer's groups are asked each time, because a callback may add parameters to them, as unfreezing does.
        if self.parts.optimizer is None:
            trained = [parameter for parameter in self.parts.model.parameters() if parameter.requires_grad]
            return [*trained, *trained_outside(self.context.holder, held_parts(self.context.holder)).values()]
        return [parameter for group in self.parts.optimizer.param_groups for parameter in group["params"]]

    def record(self, history: Any) -> None:
        """Record the metrics of an epoch that only the step knows."""
        if self.asked.settings.gradient_clip_norm is not None:
            history.update_metric("gradient_norm", self.reports.gradient_norms.average)
            self.reports.gradient_norms.reset()
