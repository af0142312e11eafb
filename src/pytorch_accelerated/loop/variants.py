"""Steps on multiple ranks.

Ranks without samples in the last update of a pass take part in what the others do together: exchanging gradients, and
the `gather` calls of their hooks and callbacks. `docs/design/updates.md` has the reasons.

A variant that changes gradients does so in `Step.complete_gradients`, with `_always_completes_gradients = True`: the
Hugging Face step has an `applying`, a `clip` and a `compute` of its own.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from pytorch_accelerated.data.updates import MicroBatch, Update
from pytorch_accelerated.loop.context import Context
from pytorch_accelerated.loop.guarded import GuardedStep
from pytorch_accelerated.loop.hook_output import adding_nothing
from pytorch_accelerated.loop.step import Call, Step
from pytorch_accelerated.ranks.held import held_parts, optimizers_of, trained_outside


class RankedStep(Step):
    """A step on multiple ranks, one of which may have fewer batches than the others.

    The wrapper of a model exchanges the gradients of its own parameters only. Gradients of what optimizers train
    outside of the model, such as a loss function with parameters, would diverge between ranks, and then so would the
    model: the step averages them. An optimizer that steps at another moment, such as a discriminator's in the middle of
    a batch, has them averaged right before.

    Attributes:
        uneven: how the rows of this rank count.
    """

    def __init__(self, context: Context, *args: Any, **kwargs: Any) -> None:
        super().__init__(context, *args, **kwargs)
        assert context.parts.uneven is not None
        self.uneven = context.parts.uneven
        held = held_parts(context.holder)
        self._outside = trained_outside(context.holder, held)
        self._averaged: Update | None = None
        self._handles: list[Any] = []
        if self._outside:
            self._always_completes_gradients = True
            optimizers = optimizers_of(context.holder, held).values()
            raw = [getattr(optimizer, "optimizer", optimizer) for optimizer in optimizers]
            steps = [each for each in raw if isinstance(each, torch.optim.Optimizer)]
            self._handles = [optimizer.register_step_pre_hook(self._before_step) for optimizer in steps]

    def add(self, micro_batch: MicroBatch) -> None:
        """Add the gradients of a batch.

        A borrowed one counts nowhere: it only makes this rank exchange gradients when the others do.
        """
        if micro_batch.is_borrowed:
            with self.uneven.counting_nothing():
                super().add(micro_batch)
        else:
            super().add(micro_batch)
        # The backward pass exchanges gradients. The host of a GPU does not wait for that.
        if micro_batch.is_last and self.backward_began is not None and self.parts.ranks.device.type == "cpu":
            self.parts.reports.epoch_clock.meeting_seconds += time.perf_counter() - self.backward_began

    def weigh(self, output: Mapping[str, Any]) -> Any:
        """The loss times its share of the update; for a borrowed batch a loss that adds nothing."""
        if not self.micro_batch.is_borrowed:
            return super().weigh(output)
        if self.is_counted_late(output):
            self.late_counts.add(0, self.micro_batch.update.samples)
        return adding_nothing(output["loss"])

    def emit_of_batch(self, event: str, **kwargs: Any) -> None:
        """Emit an event of the current batch, together with the ranks that have none: they answer its `gather`."""
        emit, micro_batch = self.control.emitter.emit, self.micro_batch
        if micro_batch.has_empty_rank:
            self.uneven.take_part(lambda: emit(event, **kwargs), is_idle=micro_batch.is_borrowed)
        else:
            emit(event, **kwargs)

    def complete_gradients(self) -> bool:
        """Average the gradients outside of the model, then scale all of them to their true size."""
        if self._outside:
            self._average(list(self._outside.values()))
            self._averaged = self.micro_batch.update
        return super().complete_gradients()

    def finish(self, calls: Sequence[Call], *, is_skipped: bool) -> None:
        """Apply the update; see `Step.finish`."""
        super().finish(calls, is_skipped=is_skipped)
        self._averaged = None

    def release(self) -> None:
        """Leave the optimizers as they were, too."""
        super().release()
        for handle in self._handles:
            handle.remove()

    def _before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if self._averaged is not self.micro_batch.update:
            stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
            self._average([each for each in self._outside.values() if id(each) in stepped])

    @torch.no_grad()
    def _average(self, parameters: Collection[torch.Tensor]) -> None:
        """Replace gradients by their means over the ranks, where one without a gradient counts as 0."""
        ranks = self.parts.ranks
        for kind in dict.fromkeys((each.dtype, each.device) for each in parameters):
            alike = [each for each in parameters if (each.dtype, each.device) == kind]
            own = [torch.zeros_like(each) if each.grad is None else each.grad.to_dense() for each in alike]
            flags = torch.tensor([each.grad is not None for each in alike], dtype=kind[0])
            values = torch.cat([each.reshape(-1).to(ranks.device) for each in (*own, flags)])
            values = ranks.sum_on_device(values) / ranks.count
            *means, is_anywhere = torch.split(values, [*(each.numel() for each in alike), len(alike)])
            for parameter, mean, is_there in zip(alike, means, is_anywhere, strict=True):
                if parameter.grad is not None or is_there:  # else no rank has one, and optimizers pass it over
                    parameter.grad = mean.view_as(parameter).to(parameter.device)


class GuardedRankedStep(GuardedStep, RankedStep):
    """A step on multiple ranks that undoes an update whose losses or gradients are not finite."""
