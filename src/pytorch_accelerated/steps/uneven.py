"""A step on several ranks, some of which may have no samples left in the last update of a pass.

All ranks then take part in what the others do together: exchanging gradients, and the `gather` calls of their hooks and
callbacks. `docs/design/updates.md` has the reasons.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pytorch_accelerated.data.updates import MicroBatch
from pytorch_accelerated.steps.hook_output import adding_nothing, loss_and_size
from pytorch_accelerated.steps.step import Step

if TYPE_CHECKING:
    from pytorch_accelerated.facts.context import Context


class UnevenStep(Step):
    """A step on several ranks.

    Attributes:
        uneven: how the rows of this rank count.
    """

    def __init__(self, context: Context, *args: Any, **kwargs: Any) -> None:
        super().__init__(context, *args, **kwargs)
        self.uneven = context.uneven

    def run_batch(self, micro_batch: MicroBatch) -> None:
        """Add the gradients of a batch.

        A borrowed one counts nowhere: it only makes this rank exchange gradients when the others do.
        """
        self.micro_batch = micro_batch
        if not micro_batch.is_borrowed:
            self._take_part_if_silent("on_train_step_start")
            super().run_batch(micro_batch)
            return
        self.emit_of_batch("on_train_step_start")
        with self.uneven.counting_nothing():
            self.compute(micro_batch.batch, self.context.state.batches_in_epoch)

    def report(self, output: Any, batch: Any, step: int) -> None:
        """Tell the loss tracker and the callbacks about a batch, unless it is borrowed."""
        if self.micro_batch.is_borrowed:
            loss_and_size(output, hook="calculate_train_batch_loss")
            self.emit_of_batch("on_train_step_end")
        else:
            super().report(output, batch, step)
            self._take_part_if_silent("on_train_step_end")

    def weigh(self, output: Mapping[str, Any]) -> Any:
        """The loss times its share of the update; that of a borrowed batch adds nothing."""
        if not self.micro_batch.is_borrowed:
            return super().weigh(output)
        if self.is_counted_late(output):
            self.late_counts.add(0, self.current.samples)
        return adding_nothing(output["loss"])

    def emit_of_batch(self, event: str, **kwargs: Any) -> None:
        """Emit an event of the current batch, together with the ranks that have none."""
        emit, micro_batch = self.context.emitter.emit, self.micro_batch
        if micro_batch.has_empty_rank:
            self.uneven.take_part(lambda: emit(event, **kwargs), is_idle=micro_batch.is_borrowed)
        else:
            emit(event, **kwargs)

    def _take_part_if_silent(self, event: str) -> None:
        """If no callback of this rank handles `event`, those of other ranks may still gather."""
        if self.micro_batch.has_empty_rank and not self.context.callbacks.acts_at[event]:
            self.emit_of_batch(event)
