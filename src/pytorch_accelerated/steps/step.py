"""An update, written once: forward, report, weigh, backward, complete, clip, apply.

Read `Step.update` and `Step.compute` first. Subclasses replace a part: those beside it, and the one in `uneven.py`
for ranks without rows. The kind of step is chosen once, when the run is created. Hooks are looked up whenever they are
called, so that a callback may replace one within the run.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from pytorch_accelerated.compat.torch import found_infinite, scale_all
from pytorch_accelerated.data.updates import CountItems, MicroBatch, Update
from pytorch_accelerated.errors import StopTrainingError
from pytorch_accelerated.facts.settings import TrainSettings
from pytorch_accelerated.models.numerics import clip_norm
from pytorch_accelerated.models.sharding import own_parts
from pytorch_accelerated.processes.accelerators import Accelerator
from pytorch_accelerated.processes.ranks import Ranks, UnevenRanks
from pytorch_accelerated.steps.hook_output import adding_nothing, loss_and_size
from pytorch_accelerated.steps.late_counts import LateCounts
from pytorch_accelerated.tracking.loss import LossTracker

if TYPE_CHECKING:
    from pytorch_accelerated.steps.guarded import Rollbacks
    from pytorch_accelerated.training.emitting import Emitter
    from pytorch_accelerated.training.hooks import TrainerHooks


@dataclasses.dataclass
class StepParts:
    """The parts that an update works with.

    Attributes:
        hooks: the trainer, whose hooks are called.
        emitter: calls callbacks and hooks.
        ranks: the processes.
        accelerator: the accelerator of this process.
        settings: the settings of the run.
        holder: the trainer that users see, which may hold more than a model and an optimizer; see `models.held`.
        outside: what optimizers train that is not the model's, by path.
        accumulating: a context for a batch after which ranks need not exchange gradients yet.
        losses: receives the losses of batches.
        gradient_norms: receives the norms of gradients, if they are clipped by norm.
        steps_scheduler: whether the scheduler steps after each update.
        own_passes: the user's own version of `_perform_forward_and_backward_passes`, if there is one.
        own_clipping: the user's own version of `_clip_gradients`, if there is one.
        own_recording: the user's own version of `_update_loss_tracker`, if there is one.
        uneven: how rows count when some ranks have none; None for a single process.
        count_items: counts the items of a host batch, if the loss is not a mean over samples.
        rollbacks: finds the state to go back to after a non-finite update, if that is the policy.
    """

    hooks: TrainerHooks
    emitter: Emitter
    ranks: Ranks
    accelerator: Accelerator
    settings: TrainSettings
    holder: Any
    outside: Mapping[str, torch.Tensor]
    accumulating: Callable[[], contextlib.AbstractContextManager[Any]]
    losses: LossTracker
    gradient_norms: LossTracker
    steps_scheduler: bool
    own_passes: Callable[[Any, int], None] | None = None
    own_clipping: Callable[[], None] | None = None
    own_recording: Callable[[torch.Tensor, Any], None] | None = None
    uneven: UnevenRanks | None = None
    count_items: CountItems | None = None
    rollbacks: Rollbacks | None = None
    before_applying: Callable[[], None] | None = None


# The owner and the name of something that an update calls.
Call = tuple[object, str]

_NO_UPDATE = Update((), samples=0)
_NO_BATCH = MicroBatch(None)


class Step:
    """Computes the updates of a training run.

    Args:
        parts: the parts it works with.

    Attributes:
        current: the current update.
        micro_batch: the current batch.
    """

    def __init__(self, parts: StepParts) -> None:
        self.parts = parts
        self.current, self.micro_batch = _NO_UPDATE, _NO_BATCH
        self.late_counts = LateCounts(parts.ranks)
        self._hooks = parts.hooks
        self._emitter = parts.emitter
        self._compute = parts.own_passes or self.compute
        self._record = parts.own_recording or parts.losses.update
        self._has_scaler = self._always_completes = parts.accelerator.scaler is not None
        scheduling: list[Call] = [(parts.hooks, "scheduler_step")] if parts.steps_scheduler else []
        discarding: Call = (parts.hooks, "optimizer_zero_grad")
        # By whether fp16 skips the update: its scaler does not step the optimizer then, but must be called.
        self._calls = {
            False: [*self.applying(), *scheduling, discarding],
            True: [*self.applying(), discarding],
        }

    def update(self, update: Update) -> None:
        """One optimizer update from the batches of `update`."""
        self.current = update
        for micro_batch in update.micro_batches:
            if micro_batch.is_last:  # ranks exchange gradients in the backward pass of the last batch only
                self.run_batch(micro_batch)
            else:
                with self.parts.accumulating():
                    self.run_batch(micro_batch)
        is_skipped = (self._always_completes or self.late_counts.are_pending) and self.complete()
        if self._hooks.callback_handler.acts_at["on_optimizer_step_start"]:
            self._emitter.emit("on_optimizer_step_start")
        self.finish(self._calls[is_skipped], is_skipped=is_skipped)

    def run_batch(self, micro_batch: MicroBatch) -> None:
        """Add the gradients of one batch of the update."""
        hooks = self._hooks
        state = hooks.run_state
        self.micro_batch, self._emitter.batch = micro_batch, micro_batch.batch
        if hooks.callback_handler.acts_at["on_train_step_start"]:
            self.emit_of_batch("on_train_step_start")
        self._compute(micro_batch.batch, state.batches_in_epoch)
        state.batches_in_epoch += 1

    def compute(self, batch: Any, step: int) -> None:
        """Forward, report, weigh, backward. A request to stop in the backward pass is deferred.

        Args:
            batch: the batch, on the trainer's device.
            step: the number of this rank's earlier batches in the epoch.
        """
        emitter, micro_batch = self._emitter, self.micro_batch
        samples = micro_batch.samples if batch is micro_batch.batch else None  # the user may have taken a part of it
        output = emitter.output_of(self._hooks.calculate_train_batch_loss, batch, samples)
        self.report(output, batch, step)
        # Nearly all hooks count nothing. The first batch decides that, so it is checked more closely.
        is_counted = self.late_counts.hook_counts is not False or output.get("num_items_in_batch") is not None
        loss = self.weigh(output) if is_counted or micro_batch.weight != 1 else output["loss"]
        backward = self._hooks.backward_step
        try:
            backward(loss)
        except StopTrainingError as wish:
            emitter.wish = emitter.wish or wish
        except Exception as error:
            emitter.note_failure(error, backward)
            raise

    def report(self, output: Any, batch: Any, step: int) -> None:
        """Tell the loss tracker and the callbacks about a batch."""
        loss, size = loss_and_size(output, hook="calculate_train_batch_loss")
        items = self.micro_batch.items
        self._record(loss, size if items is None else items)
        if self._hooks.callback_handler.acts_at["on_train_step_end"]:
            self.emit_of_batch("on_train_step_end", batch=batch, batch_output=output, step=step)

    def emit_of_batch(self, event: str, **kwargs: Any) -> None:
        """Emit an event of the current batch."""
        self._emitter.emit(event, **kwargs)

    def weigh(self, output: Mapping[str, Any]) -> Any:
        """The loss times its share of the update, as far as that is known; `complete` does the rest."""
        loss: Any = output["loss"]
        weight: Any = self.micro_batch.weight
        if self.is_counted_late(output):
            count = output.get("num_items_in_batch")
            weight = self.late_counts.add(output["batch_size"] if count is None else count, self.current.samples)
            if isinstance(weight, torch.Tensor):
                return loss * weight.to(device=loss.device, dtype=loss.dtype)
        if weight == 1:
            return loss
        return loss * weight if weight else adding_nothing(loss)

    def is_counted_late(self, output: Mapping[str, Any]) -> bool:
        """Whether the weight of the current batch depends on the hook's output."""
        counts = self.late_counts.check(output)
        return self.micro_batch.weight is None or (counts and self.micro_batch.items is None)

    def complete(self) -> bool:
        """Scale the gradients to their true size, if something is left to be done for that.

        Returns:
            Whether fp16 found them infinite, so that nothing will change.
        """
        is_skipped = False
        accelerator, late_counts = self.parts.accelerator, self.late_counts
        if self._has_scaler:
            accelerator.unscale_gradients(self._hooks.optimizer)
            raw = getattr(self._hooks.optimizer, "optimizer", self._hooks.optimizer)
            is_skipped = found_infinite(accelerator.scaler, raw)  # the only read that fp16 needs
        if late_counts.are_pending:
            factor = late_counts.take_factor()
            if factor is not None:
                scale_all(own_parts(each.grad for each in self.parameters() if each.grad is not None), factor)
        return is_skipped

    def finish(self, calls: Sequence[Call], *, is_skipped: bool) -> None:
        """Update the parameters, step the scheduler, discard the gradients, and count the update.

        The safe point begins here.

        Args:
            calls: what does so.
            is_skipped: whether nothing changes, because fp16 found infinite gradients.
        """
        hooks, emitter = self._hooks, self._emitter
        for owner, name in calls:
            emitter.defer(getattr(owner, name))
        state = hooks.run_state
        state.updates += 1
        state.updates_in_epoch += 1
        state.samples_in_epoch += self.current.samples
        state.skipped_updates += is_skipped
        hooks.run_history.updates_done += 1
        if hooks.callback_handler.acts_at["on_optimizer_step_end"]:
            emitter.emit("on_optimizer_step_end")

    def applying(self) -> list[Call]:
        """The calls that apply the update, in order."""
        parts = self.parts
        clips = parts.own_clipping is not None or parts.settings.clips_gradients
        return [*([(parts.hooks, "_clip_gradients")] if clips else []), (parts.hooks, "optimizer_step")]

    def clip(self) -> None:
        """Clip the complete gradient according to the settings. Does not wait for the device."""
        settings = self.parts.settings
        if settings.gradient_clip_value is not None:
            torch.nn.utils.clip_grad_value_(self.parameters(), settings.gradient_clip_value)
        elif settings.gradient_clip_norm is not None:
            self.parts.gradient_norms.update(clip_norm(self.parameters(), settings.gradient_clip_norm))

    def release(self) -> None:
        """Drop the references to the last batch, and to what training wrapped around the model."""
        self.current, self.micro_batch, self._emitter.batch = _NO_UPDATE, _NO_BATCH, None
        self.parts.accumulating = contextlib.nullcontext

    def parameters(self) -> list[torch.Tensor]:
        """The parameters of the optimizer; if the user steps others instead, all that they may train."""
        hooks = self._hooks
        if hooks.optimizer is None:
            trained = [parameter for parameter in hooks.model.parameters() if parameter.requires_grad]
            return [*trained, *self.parts.outside.values()]
        return [parameter for group in hooks.optimizer.param_groups for parameter in group["params"]]

    def record(self, history: Any) -> None:
        """Record the metrics of an epoch that only the step knows."""
        if self.parts.settings.gradient_clip_norm is not None:
            history.update_metric("gradient_norm", self.parts.gradient_norms.average)
            self.parts.gradient_norms.reset()
