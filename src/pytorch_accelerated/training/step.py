"""An update, written once: forward, report, weigh, backward, complete, clip, apply.

Read `Step.update` and `Step.compute` first. Subclasses replace a part: those in `steps/`, and the one in `uneven.py`
for ranks without rows. The kind of step is chosen once, when the run is created.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch

from pytorch_accelerated.compat.torch import found_infinite, scale_all
from pytorch_accelerated.data.updates import MicroBatch, Update
from pytorch_accelerated.errors import StopTrainingError
from pytorch_accelerated.models.sharding import own_parts, whole
from pytorch_accelerated.processes.accelerators import Accelerator
from pytorch_accelerated.processes.ranks import Ranks
from pytorch_accelerated.tracking.loss import LossTracker
from pytorch_accelerated.training.emitting import Emitter
from pytorch_accelerated.training.hook_output import adding_nothing, loss_and_size
from pytorch_accelerated.training.hooks import TrainerHooks
from pytorch_accelerated.training.late_counts import LateCounts
from pytorch_accelerated.training.settings import TrainSettings


@dataclasses.dataclass
class StepParts:
    """The parts that an update works with.

    Attributes:
        hooks: the trainer, whose hooks are called.
        emitter: calls callbacks and hooks.
        ranks: the processes.
        accelerator: the accelerator of this process.
        settings: the settings of the run.
        accumulating: a context for a batch after which ranks need not exchange gradients yet.
        losses: receives the losses of batches.
        gradient_norms: receives the norms of gradients, if they are clipped by norm.
        steps_scheduler: whether the scheduler steps after each update.
        own_passes: the user's own version of `_perform_forward_and_backward_passes`, if there is one.
        own_clipping: the user's own version of `_clip_gradients`, if there is one.
        own_recording: the user's own version of `_update_loss_tracker`, if there is one.
    """

    hooks: TrainerHooks
    emitter: Emitter
    ranks: Ranks
    accelerator: Accelerator
    settings: TrainSettings
    accumulating: Callable[[], contextlib.AbstractContextManager[Any]]
    losses: LossTracker
    gradient_norms: LossTracker
    steps_scheduler: bool
    own_passes: Callable[[Any, int], None] | None = None
    own_clipping: Callable[[], None] | None = None
    own_recording: Callable[[torch.Tensor, Any], None] | None = None


_NO_UPDATE = Update((), samples=0)
_NO_BATCH = MicroBatch(None, 1.0, is_last=True, is_borrowed=False, has_empty_rank=False)


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
        self._hooks = hooks = parts.hooks
        self._emitter = parts.emitter
        self._compute = parts.own_passes or self.compute
        self._record = parts.own_recording or parts.losses.update
        # fp16's scaler skips the optimizer's step itself, but must be called.
        self._skipping = [*self.applying(), hooks.optimizer_zero_grad]
        self._applying = [
            *self.applying(),
            *([hooks.scheduler_step] if parts.steps_scheduler else []),
            hooks.optimizer_zero_grad,
        ]

    def update(self, update: Update) -> None:
        """One optimizer update from the batches of `update`."""
        hooks, emitter = self._hooks, self._emitter
        acts_at = hooks.callback_handler.acts_at
        self.current = update
        for micro_batch in update.micro_batches:
            if micro_batch.is_last:  # ranks exchange gradients in the backward pass of the last batch only
                self.run_batch(micro_batch)
            else:
                with self.parts.accumulating():
                    self.run_batch(micro_batch)
        is_skipped = self.complete()
        if acts_at["on_optimizer_step_start"]:
            emitter.emit("on_optimizer_step_start")
        is_skipped = self.finish(is_skipped)
        self.count(update, is_skipped=is_skipped)

    def count(self, update: Update, *, is_skipped: bool) -> None:
        """Count a finished update. The safe point begins here."""
        hooks = self._hooks
        hooks.run_state.finish_update(samples=update.samples, skipped=is_skipped)
        hooks.run_history.finish_update()
        if hooks.callback_handler.acts_at["on_optimizer_step_end"]:
            self._emitter.emit("on_optimizer_step_end")

    def run_batch(self, micro_batch: MicroBatch) -> None:
        """Add the gradients of one batch of the update."""
        state = self._hooks.run_state
        self.micro_batch, self._emitter.batch = micro_batch, micro_batch.batch
        if self._hooks.callback_handler.acts_at["on_train_step_start"]:
            self.emit_of_batch("on_train_step_start")
        self._compute(micro_batch.batch, state.batches_in_epoch)
        state.batches_in_epoch += 1

    def compute(self, batch: Any, step: int) -> None:
        """Forward, report, weigh, backward.

        Args:
            batch: the batch, on the trainer's device.
            step: the number of this rank's earlier batches in the epoch.
        """
        output = self.forward(batch)
        self.report(output, batch, step)
        self.backward(self.weigh(output))

    def forward(self, batch: Any) -> Any:
        """The output of `calculate_train_batch_loss`."""
        hook = self._hooks.calculate_train_batch_loss
        try:
            return hook(batch)
        except StopTrainingError as wish:
            self._emitter.refuse_to_stop_in(hook, wish)
            raise
        except Exception as error:
            self._emitter.note_failure(error, hook, batch)
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
        # Nearly all hooks count nothing. The first batch decides that, so it is checked more closely.
        is_plain = weight is not None and self.late_counts.hook_counts is False
        if not (is_plain and output.get("num_items_in_batch") is None) and self.is_counted_late(output):
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

    def backward(self, loss: Any) -> None:
        """Add the gradients of a weighted loss. A request to stop is deferred."""
        emitter, hook = self._emitter, self._hooks.backward_step
        try:
            hook(loss)
        except StopTrainingError as wish:
            emitter.wish = emitter.wish or wish
        except Exception as error:
            emitter.note_failure(error, hook)
            raise

    def complete(self) -> bool:
        """Scale the gradients to their true size. Returns whether fp16 found them infinite, so that nothing will
        change.
        """
        is_skipped = False
        accelerator, late_counts = self.parts.accelerator, self.late_counts
        if accelerator.scaler is not None:
            accelerator.unscale_gradients(self._hooks.optimizer)
            raw = getattr(self._hooks.optimizer, "optimizer", self._hooks.optimizer)
            is_skipped = found_infinite(accelerator.scaler, raw)  # the only read that fp16 needs
        if not late_counts.is_agreed:
            late_counts.agree()
        if late_counts.counts:
            factor = late_counts.take_factor()
            scale_all(own_parts(each.grad for each in self.parameters() if each.grad is not None), factor)
        return is_skipped

    def finish(self, is_skipped: bool) -> bool:
        """Update the parameters, step the scheduler, and discard the gradients.

        Args:
            is_skipped: whether fp16 found infinite gradients.

        Returns:
            Whether the update has changed nothing.
        """
        emitter = self._emitter
        for hook in self._skipping if is_skipped else self._applying:
            try:  # as `Emitter.defer` does it, without another call for each hook
                hook()
            except StopTrainingError as wish:
                emitter.wish = emitter.wish or wish
            except Exception as error:
                emitter.note_failure(error, hook)
                raise
        return is_skipped

    def applying(self) -> list[Callable[[], Any]]:
        """The hooks that apply the update, in order."""
        parts = self.parts
        clipping = [parts.own_clipping or self.clip] if parts.own_clipping or parts.settings.clips_gradients else []
        return [*clipping, self._hooks.optimizer_step]

    def clip(self) -> None:
        """Clip the complete gradient according to the settings. Does not wait for the device."""
        norm = self.clipped()
        if norm is not None:
            self.parts.gradient_norms.update(norm)

    def clipped(self) -> torch.Tensor | None:
        """Clip the complete gradient. Returns its norm before clipping, if it is clipped by norm."""
        settings = self.parts.settings
        if settings.gradient_clip_value is not None:
            torch.nn.utils.clip_grad_value_(self.parameters(), settings.gradient_clip_value)
        elif settings.gradient_clip_norm is not None:
            norm: torch.Tensor = torch.nn.utils.clip_grad_norm_(self.parameters(), settings.gradient_clip_norm)
            return whole(norm)  # type: ignore[no-any-return]
        return None

    def release(self) -> None:
        """Drop the references to the last batch, and to what training wrapped around the model."""
        self.current, self.micro_batch, self._emitter.batch = _NO_UPDATE, _NO_BATCH, None
        self.parts.accumulating = contextlib.nullcontext

    def parameters(self) -> list[torch.Tensor]:
        """The parameters of the optimizer."""
        return [parameter for group in self._hooks.optimizer.param_groups for parameter in group["params"]]

    @property
    def summary(self) -> str | None:
        """A message about the updates for users at the end of the run, or None."""
        return None

    def record(self, history: Any) -> None:
        """Record the metrics of an epoch that only the step knows."""
        if self.parts.settings.gradient_clip_norm is not None:
            history.update_metric("gradient_norm", self.parts.gradient_norms.average)
            self.parts.gradient_norms.reset()
