"""An update of the Hugging Face trainer: `training_step` in place of the native forward and backward pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from pytorch_accelerated.compat.torch import norms_of
from pytorch_accelerated.data.updates import MicroBatch, Update
from pytorch_accelerated.errors import HookOutputError, StopTrainingError
from pytorch_accelerated.huggingface.engine.divisor import BATCHES, ITEMS, NOTHING, LossDivisor
from pytorch_accelerated.huggingface.engine.face import Face, TrainingHooks
from pytorch_accelerated.huggingface.events.callbacks import is_ours
from pytorch_accelerated.huggingface.events.firing import Events
from pytorch_accelerated.huggingface.models.knowledge import refuse_sum
from pytorch_accelerated.models.clipping import clip_norm
from pytorch_accelerated.models.sharding import whole
from pytorch_accelerated.training.hook_output import adding_nothing
from pytorch_accelerated.training.step import Call, Step, StepParts


class FaceStep(Step):
    """A step that tells the Hugging Face callbacks about its parts.

    Losses are kept per update, not per batch.

    Attributes:
        face: the trainer that users see.
        events: calls its callbacks.
        training: the current training.
        take_items: returns the numbers of items in this rank's batches of the next update; None without counting.
        learning_rate: of the last update.
        samples_used: in the updates of this run, over all processes.
        norms: of the gradients of the last update; None if no log was expected.
        divisor: knows what the loss is divided by.
    """

    face: Face
    events: Events
    training: TrainingHooks
    take_items: Callable[[], list[int | None]] | None = None

    def __init__(self, parts: StepParts) -> None:
        super().__init__(parts)
        self.learning_rate = 0.0
        self.samples_used = 0
        # The loss of a single batch is right, whatever it is divided by.
        is_one_batch = parts.ranks.count == parts.settings.gradient_accumulation_steps == 1
        self.divisor = LossDivisor(known=ITEMS if is_one_batch else None)
        self._loss: Any = None
        self._items: int | None = None
        self.norms: Sequence[torch.Tensor] | None = None
        self._raw_optimizer = getattr(parts.hooks.optimizer, "optimizer", parts.hooks.optimizer)

    def update(self, update: Update) -> None:
        """Do one update, with its events."""
        self._emitter.defer(self.events.fire, "on_step_begin")
        if self.take_items is not None:
            self._items = self._sum_of_items(self.take_items())
        self._loss = None
        super().update(update)
        self.samples_used += update.samples
        try:
            self.training.end_step()
        except StopTrainingError as wish:
            self._emitter.wish = self._emitter.wish or wish

    def run_batch(self, micro_batch: MicroBatch) -> None:
        """Add the gradients of one batch, and tell the callbacks."""
        super().run_batch(micro_batch)
        if not micro_batch.is_last:
            self._tell("on_substep_end")

    def compute(self, batch: Any, step: int) -> None:
        """Add the gradients of one batch by the `training_step` of the Hugging Face trainer."""
        training_step = self.face.training_step
        items = None if self.divisor.known == NOTHING else self._items  # nothing, if the loss is a mean in any case
        try:
            share = training_step(self._hooks.model, batch, items)
        except Exception as error:
            self._emitter.note_failure(error, training_step, batch)
            raise
        if share is None:
            raise HookOutputError(
                f"{type(self.face).__name__}.training_step returned None, but its loss is logged. Return the batch's "
                "share of it, as that of the super class does."
            )
        if self.micro_batch.is_borrowed:  # this rank has no row left
            share = torch.zeros_like(share)
        else:
            self.training.counter.count(batch)
        self._loss = share if self._loss is None else self._loss + share

    def loss_of(self, compute: Callable[[Any], Any], num_items_in_batch: Any) -> Any:
        """The loss that `compute` returns for this number of items."""
        loss = self.divisor.loss_of(compute, num_items_in_batch)
        if num_items_in_batch is not None and self.divisor.known == NOTHING and is_ours(self.face.compute_loss):
            refuse_sum(self.face.compute_loss_func)
        return loss

    def share_of_update(self, loss: Any, num_items_in_batch: Any) -> Any:
        """The share of the update's loss that a batch with this loss contributes.

        A loss divided by the number of items of the whole update is already a share, and a mean over the rows of the
        batch is weighted. Shares are multiplied by the number of ranks, because gradients are averaged over them.
        """
        micro_batch = self.micro_batch
        if micro_batch.is_borrowed:
            return adding_nothing(loss)
        if self.divisor.known == BATCHES:
            return loss
        if num_items_in_batch is not None and self.divisor.known == ITEMS:
            weight: float = self.parts.ranks.count if self.face.args.average_tokens_across_devices else 1
        elif micro_batch.weight is None:
            weight = 1 / self.current.samples  # sizes of batches are unknown, so batches are counted instead
        else:
            weight = micro_batch.weight
        if weight == 1:
            return loss
        return loss * weight if weight else adding_nothing(loss)

    def applying(self) -> list[Call]:
        """The calls that change the parameters, in order, with the events between them."""
        return [(self, "clip"), (self, "before_optimizer"), (self._hooks, "optimizer_step"), (self, "after_optimizer")]

    def clip(self) -> None:
        """Clip the complete gradient, and keep its norm if it may be logged."""
        limit = self.parts.settings.gradient_clip_norm
        if limit is not None:
            self.norms = [clip_norm(self.parameters(), limit)]
        elif self.training.may_log_step():
            # Norms of the tensors: combining them is slower, and can wait until the norm is logged.
            self.norms = norms_of([parameter.grad for parameter in self.parameters() if parameter.grad is not None])
        else:
            self.norms = None

    @property
    def gradient_norm(self) -> float | None:
        """The norm of the last update's gradient before clipping; None if no log was expected.

        Waits for the device. Must be called by all ranks.
        """
        if self.norms is None:
            return None
        return float(whole(torch.nn.utils.get_total_norm(self.norms)))

    def record(self, history: Any) -> None:
        """Nothing for an epoch: norms are logged step by step."""

    def before_optimizer(self) -> None:
        """Emit the event before the optimizer's step, and note the learning rate."""
        self._tell("on_pre_optimizer_step")
        self.learning_rate = self._raw_optimizer.param_groups[0]["lr"]

    def after_optimizer(self) -> None:
        """Emit the event after the optimizer's step, and keep the loss of the update."""
        self._tell("on_optimizer_step")
        self.parts.losses.update(self._loss)

    def _tell(self, event: str) -> None:
        """Fire an event, if any callback listens to it."""
        if self.events.listens_to(event):
            self._emitter.defer(self.events.fire, event)

    def _sum_of_items(self, counts: list[int | None]) -> int | None:
        """The items of this update; None if some batches could not be counted."""
        ranks = self.parts.ranks
        if ranks.any(None in counts):
            return None
        total = sum(count or 0 for count in counts)
        if self.face.args.average_tokens_across_devices:
            return int(ranks.sum([total])[0])
        return max(1, total)  # a process without any label adds 0, not 0 / 0


class ZeroStep(FaceStep):
    """A step under ZeRO, where no rank has a gradient to itself: the optimizer's step clips and knows the norm."""

    def clip(self) -> None:
        """Leave clipping to the optimizer's step."""

    def after_optimizer(self) -> None:
        """Take the norm of the gradient from the optimizer."""
        self.norms = [self._hooks.optimizer.gradient_norm]
        super().after_optimizer()
