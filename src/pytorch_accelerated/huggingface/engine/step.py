"""An update of the Hugging Face trainer: `training_step` in place of the native forward and backward pass."""

from __future__ import annotations

import collections
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from pytorch_accelerated.data.updates import MicroBatch, Update
from pytorch_accelerated.errors import HookOutputError, StopTrainingError
from pytorch_accelerated.huggingface.events import Events, is_ours
from pytorch_accelerated.huggingface.knowledge import items_of_update, reads_scale
from pytorch_accelerated.loop.hook_output import adding_nothing
from pytorch_accelerated.loop.step import Call, Step
from pytorch_accelerated.loop.variants import RankedStep
from pytorch_accelerated.ranks.accelerators import send_to_device
from pytorch_accelerated.ranks.compat.torch import norms_of
from pytorch_accelerated.ranks.sharding import whole
from pytorch_accelerated.record.warning import warn_user

if TYPE_CHECKING:
    from pytorch_accelerated.huggingface.engine.training import FaceTraining
    from pytorch_accelerated.huggingface.trainer import Trainer
    from pytorch_accelerated.loop.context import Context


class FaceStep(Step):
    """A step that tells the Hugging Face callbacks about its parts.

    Losses are kept per update, not per batch.

    Attributes:
        face: the trainer that users see.
        events: calls its callbacks.
        training: the current training.
        learning_rate: of the last update.
        samples_used: in the updates of this run, over all processes.
        norms: of the gradients of the last update; None if no log was expected.
    """

    def __init__(self, context: Context, *args: Any, **kwargs: Any) -> None:
        super().__init__(context, *args, **kwargs)
        self.training: FaceTraining = context.training  # type: ignore[assignment]
        self.face: Trainer = context.holder
        self.events: Events = context.trainer.events
        self.learning_rate = 0.0
        self.samples_used = 0
        self._loss: Any = None
        self._items: int | None = None
        self._has_checked_scale = False
        self.norms: Sequence[torch.Tensor] | None = None
        self._raw_optimizer = getattr(context.optimizer, "optimizer", context.optimizer)

    def update(self, update: Update) -> None:
        """Do one update, with its events."""
        self.context.emitter.defer(self.events.fire, "on_step_begin")
        self._items = None
        if update.items is not None:
            self._items = items_of_update(*update.items, self.face.args)
        if not is_ours(self.face.get_batch_samples):
            update = update._replace(micro_batches=self._own_batches(update))
        self._loss = None
        super().update(update)
        self.samples_used += update.samples
        try:
            self.training.end_step()
        except StopTrainingError as wish:
            self.context.emitter.wish = self.context.emitter.wish or wish

    def run_batch(self, micro_batch: MicroBatch) -> None:
        """Add the gradients of one batch, and tell the callbacks."""
        self.context.accelerator.sync_gradients = micro_batch.is_last  # scripts act on it
        super().run_batch(micro_batch)
        if not micro_batch.is_last:
            self._tell("on_substep_end")

    def compute(self, batch: Any, step: int) -> None:
        """Add the gradients of one batch by the `training_step` of the Hugging Face trainer."""
        training_step, model = self.face.training_step, self.context.model
        if not model.training:  # after an evaluation
            model.train()
        try:
            share = training_step(model, batch, self._items)
        except Exception as error:
            self.context.emitter.explain(error, training_step, batch)
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

    def share_of_update(self, loss: Any, num_items_in_batch: Any) -> Any:
        """The share of the update's loss that a batch with this loss contributes.

        A loss that was told the number of items is already a share, unless the trainer declares another scale. Other
        losses are means, and weighted.
        """
        micro_batch = self.micro_batch
        if micro_batch.is_borrowed or micro_batch.items == 0:  # a mean of nothing is NaN
            return adding_nothing(loss)
        is_share = self.face.loss_is_scaled_for_ga
        if is_share is None and num_items_in_batch is not None and self.face.counts_items:
            is_share = True
            self._check_scale()
        # If sizes of batches are unknown, batches are counted instead.
        weight = 1 / self.current.samples if micro_batch.weight is None else micro_batch.weight
        return loss if is_share or weight == 1 else loss * weight

    def applying(self) -> list[Call]:
        """The calls that change the parameters, in order, with the events between them."""
        return [
            (self, "clip"),
            (self, "before_optimizer"),
            (self.context.trainer, "optimizer_step"),
            (self, "after_optimizer"),
        ]

    def clip(self) -> None:
        """Clip the complete gradient, and keep its norm if it may be logged."""
        limit = self.context.settings.gradient_clip_norm
        if limit is not None:
            self.norms = [self.clip_norm(limit)]
        elif self.training.log.may_be_due():
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
        self.context.losses.update(self._loss)

    def _tell(self, event: str) -> None:
        """Fire an event, if any callback listens to it."""
        if self.events.listens_to(event):
            self.context.emitter.defer(self.events.fire, event)

    def _check_scale(self) -> None:
        """Warn once about an overridden `compute_loss` that divides by nothing, so that its mean is no share."""
        steps, compute_loss = self.context.settings.gradient_accumulation_steps, self.face.compute_loss
        if not self._has_checked_scale and steps > 1 and not (is_ours(compute_loss) or reads_scale(compute_loss)):
            warn_user(
                self.context.ranks,
                f"{type(self.face).__name__}.compute_loss does not divide by `num_items_in_batch`, the number of "
                f"labels in the update, which it is given because the model takes any keyword. So the loss of {steps} "
                f"batches is {steps} times their mean, as in transformers. Divide by it, or set `loss_is_scaled_for_ga "
                "= False` in the class: the loss is a mean then, and is weighted.",
            )
        self._has_checked_scale = True

    def _own_batches(self, update: Update) -> list[MicroBatch]:
        """The batches of an update that an overridden `get_batch_samples` returns, and whose items it counts."""
        planned: list[MicroBatch] = []

        def batches() -> Iterator[Any]:
            for micro_batch in update.micro_batches:
                planned.append(micro_batch)
                yield micro_batch.batch

        face: Any = self.face
        device, left = face.args.device, batches()
        own, self._items = face.get_batch_samples(left, face.current_gradient_accumulation_steps, device)
        collections.deque(left, maxlen=0)  # which are left out
        if not own:
            raise HookOutputError(
                f"{type(face).__name__}.get_batch_samples returned no batch for an update. Return at least one of "
                "those that the iterator yields."
            )
        if len(own) != len(planned):  # batches that count the same
            planned = [MicroBatch(None, weight=1 / len(own), is_last=False) for _ in own]
            planned[-1] = planned[-1]._replace(is_last=True)
        return [each._replace(batch=send_to_device(batch, device)) for each, batch in zip(planned, own, strict=True)]


class RankedFaceStep(FaceStep, RankedStep):
    """A step of the Hugging Face trainer on several ranks."""
