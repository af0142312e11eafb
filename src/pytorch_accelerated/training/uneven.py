"""Ranks without rows: the parts of a step and of a pass on several ranks.

In the last update or round of a pass, only some ranks may have batches. All ranks then take part in what these ranks do
together: exchanging gradients, and the `gather` calls of their hooks and callbacks. A single process uses nothing in
this module. `docs/design/updates.md` has the reasons.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

from pytorch_accelerated.data.updates import MicroBatch, Round
from pytorch_accelerated.prediction.collecting import PredictionCollector
from pytorch_accelerated.processes.ranks import UnevenRanks
from pytorch_accelerated.steps.hook_output import adding_nothing, loss_and_size
from pytorch_accelerated.steps.step import Step, StepParts
from pytorch_accelerated.training.passes import Passes, Record


class UnevenStep(Step):
    """A step on several ranks, some of which may have no samples left.

    Attributes:
        uneven: how the rows of this rank count.
    """

    def __init__(self, parts: StepParts) -> None:
        super().__init__(parts)
        assert parts.uneven is not None
        self.uneven = parts.uneven

    def run_batch(self, micro_batch: MicroBatch) -> None:
        """Add the gradients of a batch.

        A borrowed one counts nowhere: it only makes this rank exchange gradients when the others do.
        """
        self.micro_batch, self._emitter.batch = micro_batch, micro_batch.batch
        if not micro_batch.is_borrowed:
            self._take_part_if_silent("on_train_step_start")
            super().run_batch(micro_batch)
            return
        self.emit_of_batch("on_train_step_start")
        with self.uneven.counting_nothing():
            self.compute(micro_batch.batch, self._hooks.run_state.batches_in_epoch)

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
        if self.micro_batch.has_empty_rank:
            is_idle = self.micro_batch.is_borrowed
            self.uneven.take_part(lambda: self._emitter.emit(event, **kwargs), is_idle=is_idle)
        else:
            self._emitter.emit(event, **kwargs)

    def _take_part_if_silent(self, event: str) -> None:
        """If no callback of this rank handles `event`, those of other ranks may still gather."""
        if self.micro_batch.has_empty_rank and not self._hooks.callback_handler.acts_at[event]:
            self.emit_of_batch(event)


class UnevenPasses(Passes):
    """Passes on several ranks, some of which may have no samples in the last round.

    Args:
        is_sharded: whether no rank has a whole model, so that all of them go through it together.
    """

    def __init__(self, *parts: Any, uneven: UnevenRanks, is_sharded: bool) -> None:
        super().__init__(*parts)
        self._uneven = uneven
        self._is_sharded = is_sharded

    def evaluate(self, round_: Round, record: Record) -> None:
        """Compute the loss of a round."""
        if not round_.has_empty_rank:
            super().evaluate(round_, record)
            return
        self._take_part(round_, lambda: self.emit("on_eval_step_start"))
        output = self._output_of(self._hooks.calculate_eval_batch_loss, round_)
        if not round_.is_idle:
            loss, size = loss_and_size(output, hook="calculate_eval_batch_loss")
            record(loss, size if round_.items is None else round_.items)
        self._take_part(round_, lambda: self.emit("on_eval_step_end", batch=round_.batch, batch_output=output))

    def predict(self, round_: Round, collector: PredictionCollector) -> None:
        """Compute the predictions of a round and collect them."""
        if not round_.has_empty_rank:
            super().predict(round_, collector)
            return
        predictions = self._output_of(self._hooks.calculate_predict_batch_outputs, round_)
        if not round_.is_idle:
            collector.add(round_.start, predictions, round_.samples)
        event = "on_prediction_step_end"
        self._take_part(round_, lambda: self.emit(event, batch=round_.batch, predictions=predictions))

    def _output_of(self, hook: Callable[[Any], Any], round_: Round) -> Any:
        """The output of `hook` for the batch of a round; None on a rank without one."""
        emitter = self._emitter
        batch, samples, start = round_.batch, round_.samples, round_.start
        if not self._is_sharded:
            return self._take_part(round_, lambda: emitter.output_of(hook, batch, samples, start))
        # An idle rank runs the model on a batch that counts nowhere.
        with self._uneven.counting_nothing() if round_.is_idle else contextlib.nullcontext():
            output = emitter.output_of(hook, batch, samples, start)
        return None if round_.is_idle else output

    def _take_part(self, round_: Round, work: Callable[[], Any]) -> Any:
        return self._uneven.take_part(work, is_idle=round_.is_idle)
