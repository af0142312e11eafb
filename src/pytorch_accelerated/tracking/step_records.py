"""What a run measures within its epochs: the records, and what makes them."""

from __future__ import annotations

import itertools
import math
import sys
import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from pytorch_accelerated.tracking.loss import LossTracker
from pytorch_accelerated.tracking.timing import EpochClock

if TYPE_CHECKING:
    from pytorch_accelerated.tracking.history import RunHistory

_RATES = 5  # the place of `learning_rates` in a record
_COLUMNS = 11  # of the table, before those of the learning rates
_UNKNOWN = -1


try:
    import resource
except ImportError:  # Windows has none
    resource = None  # type: ignore[assignment]
_MOST_RECORDS = 2048


class StepRecord(NamedTuple):
    """What was measured over some consecutive updates, of one epoch unless records were joined.

    A run has 2,048 of them at most, unless it was told how often to make one: before there would be more, neighbours
    are joined, which then may be of several epochs. Each update belongs to exactly one record, and all ranks have the
    same records: losses and samples are those of all ranks, times those of rank 0.

    Attributes:
        epoch: the epoch of the last of the updates, counted from 1.
        update: the number of optimizer updates up to and including the last one of the record, since the history was
            reset.
        samples: the samples used up to and including that update, over all ranks, including those of skipped ones.
        seconds: wall time of training until the last update of the record, with evaluations and saves. A resumed run
            continues the time of its training state.
        train_loss: the mean training loss per item over the updates of the record, the batches of each, and all ranks,
            weighted as in ``train_loss_epoch``. Losses that
            `nonfinite_policy` leaves out do not count; NaN if none does, or if one that counts is NaN.
        learning_rates: one for each parameter group of the optimizer, as set after the last update of the record, so
            they are those of the update that follows; empty if the trainer has no optimizer.
        gradient_norm: the mean norm of the gradients before clipping; None unless they are clipped by norm.
        samples_per_second: the samples of the record, over all ranks, per second of training without evaluations and
            saves; of a record in which a run was resumed, those after that.
        data_wait_share: the share of those seconds in which rank 0 waited for the next batch, between 0 and 1.
        peak_memory: the most bytes that a rank has used so far: allocated on its GPU, or resident in its process if it
            trains on the CPU; None if unknown.
    """

    epoch: int
    update: int
    samples: int
    seconds: float
    train_loss: float
    learning_rates: tuple[float, ...]
    gradient_norm: float | None
    samples_per_second: float
    data_wait_share: float
    peak_memory: int | None

    def columns(self) -> dict[str, float]:
        """The values of the record as columns of a table, without those that are None.

        The learning rate of the first parameter group is `learning_rate`; other groups have `learning_rate_1` and so
        on.
        """
        values: dict[str, Any] = {}
        for name, value in zip(self._fields, self, strict=True):
            if name == "learning_rates":
                rates = enumerate(self.learning_rates)
                values |= {f"learning_rate_{group}" if group else "learning_rate": rate for group, rate in rates}
            elif value is not None:
                values[name] = value
        return values


def joined(records: Sequence[StepRecord], most: int) -> list[StepRecord]:
    """At most `most` records, each of about as many updates: neighbours become one, of as many epochs as they have.

    Losses and norms are averaged by samples, those that are NaN or missing left out.
    """
    width, before, result = records[-1].update / most, 0, []
    for _, group in itertools.groupby(records, key=lambda record: math.ceil(record.update / width)):
        result.append(_joined(list(group), before))
        before = result[-1].samples
    return result


def _joined(group: Sequence[StepRecord], samples_before: int) -> StepRecord:
    last = group[-1]
    samples = np.diff([samples_before, *(record.samples for record in group)])
    speeds = np.array([record.samples_per_second or math.inf for record in group])
    seconds = samples / speeds  # of training
    norm = _mean([math.nan if record.gradient_norm is None else record.gradient_norm for record in group], samples)
    return last._replace(
        train_loss=_mean([record.train_loss for record in group], samples),
        gradient_norm=None if math.isnan(norm) else norm,
        samples_per_second=float(samples.sum() / seconds.sum()) if seconds.any() else 0.0,
        data_wait_share=_mean([record.data_wait_share for record in group], seconds) if seconds.any() else 0.0,
        peak_memory=max((record.peak_memory for record in group if record.peak_memory is not None), default=None),
    )


def _mean(values: Sequence[float], weights: Any) -> float:
    """The weighted mean of what is not NaN; NaN without any."""
    known = ~np.isnan(values)
    return float(np.average(np.array(values)[known], weights=np.array(weights)[known])) if known.any() else math.nan


def samples_per_second(records: Sequence[StepRecord]) -> float | None:
    """The speed of a run: samples over the wall time of training, with evaluations and saves; None if unknown."""
    return records[-1].samples / records[-1].seconds if records and records[-1].seconds else None


def records_of(values: Iterable[Sequence[Any]] | torch.Tensor) -> list[StepRecord]:
    """The records of `table_of`, or those of a history saved by version 1.0, a list with a list for each.

    Raises:
        ValueError, TypeError: if `values` is neither.
    """
    if not isinstance(values, torch.Tensor):
        return [StepRecord._make([*row[:_RATES], tuple(row[_RATES]), *row[_RATES + 1 :]]) for row in values]
    if values.dtype != torch.float64 or values.dim() != 2 or values.shape[1] < _COLUMNS:
        raise ValueError(f"step records are a {values.dtype} tensor of shape {tuple(values.shape)}")
    return [
        StepRecord(
            int(epoch),
            int(update),
            int(samples),
            seconds,
            loss,
            tuple(rates[: int(groups)]),
            norm if has_norm else None,
            speed,
            wait,
            None if peak == _UNKNOWN else int(peak),
        )
        for epoch, update, samples, seconds, loss, has_norm, norm, speed, wait, peak, groups, *rates in values.tolist()
    ]


def table_of(records: Sequence[StepRecord]) -> torch.Tensor:
    """The records as a float64 matrix with a row for each. This is exact: their integers are below 2**53."""
    groups = max((len(record.learning_rates) for record in records), default=0)
    rows = [
        (
            *first,
            norm is not None,
            norm or 0.0,
            speed,
            wait,
            _UNKNOWN if peak is None else peak,
            len(rates),
            *rates,
            *[0.0] * (groups - len(rates)),
        )
        for *first, rates, norm, speed, wait, peak in records
    ]
    return torch.from_numpy(np.array(rows, dtype=np.float64).reshape(len(records), _COLUMNS + groups))


def usual_interval(updates: int) -> int:
    """The updates between two step records of a run with so many updates: a power of two.

    Runs of up to 255 updates have a record for each, runs from 1024 to 8191 one for every eighth, and longer ones have
    between 1024 and 2047. Making one takes some microseconds, and logging it to TensorBoard some fifty, which should
    not show.
    """
    return 1 << (max(updates // 1024, min(updates // 128, 8), 1).bit_length() - 1)


class _Mark(NamedTuple):
    """The end of a record whose losses have not been read.

    Attributes:
        epoch, update, samples, learning_rates: of the record. A rate may still be a tensor.
        new_samples: the samples of the record since the run was resumed.
        seconds: wall time of training.
        epoch_seconds: those of the record without evaluations and saves.
        waited: the part of `epoch_seconds` in which the loop waited for data.
    """

    epoch: int
    update: int
    samples: int
    learning_rates: tuple[Any, ...]
    new_samples: int
    seconds: float
    epoch_seconds: float
    waited: float


class StepRecorder:
    """Adds step records to a history, at the price of no transfer from the device besides those of the losses.

    Args:
        history: receives the records.
        losses: of batches.
        gradient_norms: of updates.
        device: of the model.
        interval: updates between two records, as the user asks for them; None to choose it, and to join records if
            there are too many of them.
        updates: of the whole run; None if it is unknown.

    Attributes:
        interval: updates between two records; the last record of an epoch may have fewer.
    """

    def __init__(
        self,
        history: RunHistory,
        losses: LossTracker,
        gradient_norms: LossTracker,
        device: torch.device,
        interval: int | None,
        updates: int | None,
    ) -> None:
        self.interval = interval or (1 if updates is None else usual_interval(updates))
        self._grows = interval is None and updates is None
        self._joins = interval is None
        self._history = history
        self._losses = losses
        self._gradient_norms = gradient_norms
        self._device = device
        self._marks: list[_Mark] = []
        last = history.step_records[-1] if history.step_records else None
        self._samples = 0 if last is None else last.samples
        self._set_clock(0.0 if last is None else last.seconds)
        self.start_epoch(0, 0, EpochClock(1))

    def start_epoch(self, updates: int, samples_in_epoch: int, clock: EpochClock) -> None:
        """Begin an epoch, or go on in one.

        Args:
            updates: of the run, at the beginning of the epoch or at the last reading of losses in it.
            samples_in_epoch: samples of the epoch that have been used.
            clock: times the epoch.
        """
        self._marks.clear()
        self._samples_before_epoch = self._samples - samples_in_epoch
        self._new_from, self._seconds_from, self._waited_from = self._samples, 0.0, 0.0
        self._clock = clock
        self.grow(updates)

    def grow(self, updates: int) -> None:
        """Choose the interval anew after `updates` of the run, if their final number is unknown."""
        if self._grows:
            self.interval = usual_interval(updates)

    def mark(self, samples_in_epoch: int, groups: Sequence[dict[str, Any]]) -> None:
        """End a record after the current update.

        Args:
            samples_in_epoch: samples of the epoch that have been used.
            groups: the parameter groups of the optimizer.
        """
        timing, samples = self._clock.read(), self._samples_before_epoch + samples_in_epoch
        seconds, waited = timing.seconds, timing.data_wait_seconds
        rates = tuple([rate.clone() if isinstance(rate := group["lr"], torch.Tensor) else rate for group in groups])
        self._marks.append(
            _Mark(
                timing.epoch,
                self._history.updates_done,
                samples,
                rates,
                samples - self._new_from,
                time.perf_counter() - self._started,
                seconds - self._seconds_from,
                waited - self._waited_from,
            )
        )
        self._samples = self._new_from = samples
        self._seconds_from, self._waited_from = seconds, waited
        self._losses.end_part()
        self._gradient_norms.end_part()

    def mark_rest(self, samples_in_epoch: int, groups: Sequence[dict[str, Any]]) -> None:
        """End a record after the current update, unless the last record has ended there."""
        ended = self._marks or self._history.step_records
        if self._history.updates_done > (ended[-1].update if ended else 0):
            self.mark(samples_in_epoch, groups)

    def position(self, samples: int) -> int:
        """The samples of the current epoch among the first `samples` of the history."""
        return max(0, samples - self._samples_before_epoch)

    @property
    def is_pending(self) -> bool:
        """Whether a record has ended that is not in the history yet."""
        return bool(self._marks)

    def measurements(self) -> list[int]:
        """What the ranks must tell each other before `complete`. May wait for the device."""
        if not self._marks:
            return []
        own = [
            (total, count, mark.seconds, mark.epoch_seconds, mark.waited)
            for mark, (total, count) in zip(self._marks, self._losses.take_parts(), strict=True)
        ]
        peak = peak_memory(self._device)
        bits = np.array(own, dtype=np.float64).view(np.int64).ravel()
        return [_UNKNOWN if peak is None else peak, *bits.tolist()]

    def complete(self, everyones: Sequence[Sequence[int]]) -> bool:
        """Add the records that have ended to the history.

        Args:
            everyones: the measurements of all ranks.

        Returns:
            Whether there were any.
        """
        if not self._marks:
            return False
        peak = max(numbers[0] for numbers in everyones)
        values = np.array([numbers[1:] for numbers in everyones], dtype=np.int64).view(np.float64)
        values = values.reshape(len(everyones), len(self._marks), -1)
        sums, times = values[:, :, :2].sum(axis=0).tolist(), values[0, :, 2:].tolist()
        norms = self._gradient_norms.take_parts()
        if self._joins and len(self._history.step_records) + len(self._marks) > _MOST_RECORDS:
            self._history.join_step_records(_MOST_RECORDS // 2)
        for mark, (total, count), (seconds, epoch_seconds, waited), (norm, clipped) in zip(
            self._marks, sums, times, norms, strict=True
        ):
            self._history.add_step_record(
                StepRecord(
                    mark.epoch,
                    mark.update,
                    mark.samples,
                    seconds,
                    total / count if count else math.nan,
                    tuple(map(float, mark.learning_rates)),
                    norm / clipped if clipped else None,
                    mark.new_samples / epoch_seconds if epoch_seconds else 0.0,
                    waited / epoch_seconds if epoch_seconds else 0.0,
                    None if peak == _UNKNOWN else peak,
                )
            )
        self._marks.clear()
        return True

    def state_dict(self, samples_in_epoch: int) -> dict[str, Any]:
        """The samples and the seconds so far. The records themselves are the history's."""
        return {
            # At the start of an epoch, before `start_epoch`, they are those of the epochs before.
            "samples": max(self._samples, self._samples_before_epoch + samples_in_epoch),
            "seconds": time.perf_counter() - self._started,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the result of `state_dict`."""
        self._samples = state["samples"]
        self._set_clock(state["seconds"])

    def _set_clock(self, seconds: float) -> None:
        self._started = time.perf_counter() - seconds


def peak_memory(device: torch.device) -> int | None:
    """The most bytes that this process has used so far: allocated on its GPU, else resident; None if unknown."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if device.type != "cpu" or resource is None:
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak
