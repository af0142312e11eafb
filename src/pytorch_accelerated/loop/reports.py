"""What a run reports: losses that have been read."""

from __future__ import annotations

import math
from typing import Any

from pytorch_accelerated.data.updates import RunLoader
from pytorch_accelerated.errors import DataError
from pytorch_accelerated.loop.context import Parts
from pytorch_accelerated.loop.stopping import Emitter
from pytorch_accelerated.record.loss import LossTracker
from pytorch_accelerated.record.step_records import EpochClock, StepRecorder
from pytorch_accelerated.record.values import name_in_set


class LossReports:
    """Holds what a run measures, and reports step records, mean losses, and losses that are not finite.

    All ranks must call its methods.

    Args:
        parts: of the run.
        emitter: calls the callbacks.

    Attributes:
        losses: the current loss tracker.
        gradient_norms: the gradient norms of the current epoch, if gradients are clipped by norm.
        recorder: makes the step records of a training run, if it has any.
        epoch_clock: times the current epoch.
        batch_weight: how much the current batch counts in the recorded loss: what its mean is taken over. None before
            one.
        position_in_pass: the position of the first sample of the batch that is evaluated, in the whole evaluation; None
            if there is none, or a loop of the user's own goes through the batches.
    """

    def __init__(self, parts: Parts, emitter: Emitter) -> None:
        self._parts = parts
        self._emitter = emitter
        self.losses, self.gradient_norms = LossTracker(), LossTracker()
        self.recorder: StepRecorder | None = None
        self.epoch_clock = EpochClock(1)
        self.batch_weight: Any = None
        self.position_in_pass: int | None = None

    # ---------------------------------------------------------------------------------------------------- step records

    def complete_records(self) -> None:
        """Add the step records that have ended to the history, and tell the callbacks."""
        recorder = self.recorder
        measured = [] if recorder is None else recorder.measurements()
        if recorder is not None and measured and recorder.complete(self._parts.ranks.exchange_numbers(measured)):
            self._emitter.emit("on_step_records")

    def mark_rest(self) -> None:
        """End a record after the current update, unless one has."""
        if self.recorder is not None:
            self.recorder.mark(self._parts.state.samples_in_epoch, self._parts.parameter_groups)

    def finish_records(self) -> None:
        """Make a record of the updates after the last one, since the run may end within an epoch.

        States for a resume are written before, so that the resumed run has records at the same places.
        """
        self.mark_rest()
        self.complete_records()

    def samples_between(self, start: int, stop: int) -> list[int] | None:
        """The indices in the training dataset of samples of the current epoch; None if they are unknown.

        Args:
            start: the samples of the run history before them.
            stop: the samples of the run history with them.
        """
        loader, recorder = self._parts.loaders.train, self.recorder
        if recorder is None or not isinstance(loader, RunLoader):
            return None
        return loader.indices(recorder.position(start), recorder.position(stop))

    # ---------------------------------------------------------------------------------------------------------- losses

    def report(self, losses: LossTracker) -> None:
        """Tell the callbacks about new step records, and about a training loss that is not finite."""
        recorder = self.recorder
        per_rank = self._first_non_finite_by_rank(losses, [] if recorder is None else recorder.measurements())
        if recorder is not None and recorder.complete([measured for _, *measured in per_rank]):
            self._emitter.emit("on_step_records")
        self._report_first_non_finite(losses, "train_loss_epoch", [first for first, *_ in per_rank])

    def report_non_finite(self, losses: LossTracker, metric_name: str) -> None:
        """Tell the callbacks if a loss that any rank has read is not finite."""
        per_rank = self._first_non_finite_by_rank(losses, [])
        self._report_first_non_finite(losses, metric_name, [first for (first,) in per_rank])

    def _first_non_finite_by_rank(self, losses: LossTracker, numbers: list[int]) -> list[list[int]]:
        first_bad = losses.first_non_finite
        return self._parts.ranks.exchange_numbers([-1 if first_bad is None else first_bad, *numbers])

    def _report_first_non_finite(self, losses: LossTracker, metric_name: str, per_rank: list[int]) -> None:
        steps = [step for step in per_rank if step >= 0]
        if steps:
            losses.first_non_finite = None
            history = self._parts.history
            metric_name = name_in_set(metric_name, history.evaluation_set)
            self._emitter.emit_at_once(
                "on_non_finite_loss", metric_name=metric_name, epoch=history.current_epoch, step=min(steps)
            )

    def record_mean(self, losses: LossTracker, metric_name: str) -> None:
        """Record the mean loss per item over all ranks, and start a new mean."""
        total, count, batches = self._parts.ranks.sum([losses.total_loss, losses.running_count, losses.batches_read])
        if batches and not count and not losses.leaves_out_non_finite:
            raise DataError(
                f"None of the {batches:.0f} batches has any items, so there is no mean loss to record as "
                f"{metric_name!r}. Check the counts of `count_batch_items` or 'num_items_in_batch'."
            )
        mean = total / count if count else math.nan if losses.leaves_out_non_finite else losses.average
        self.record(metric_name, mean)
        losses.reset()

    def record(self, metric_name: str, value: Any) -> None:
        """Record a metric; for the first of multiple evaluation sets also without the name of the set."""
        history = self._parts.history
        if history.evaluation_set and history.evaluation_set not in self._parts.loaders.further_eval:
            with history.measuring_on(""):
                history.update_metric(metric_name, value)
        history.update_metric(metric_name, value)
