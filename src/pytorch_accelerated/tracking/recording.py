"""Makes step records: notes where each ends, and completes them when the losses have been read in bulk."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from pytorch_accelerated.tracking.history import RunHistory
from pytorch_accelerated.tracking.loss import LossTracker
from pytorch_accelerated.tracking.step_records import StepRecord
from pytorch_accelerated.tracking.timing import EpochClock

try:
    import resource
except ImportError:  # Windows has none
    resource = None  # type: ignore[assignment]

_UNKNOWN = -1


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
        interval: updates between two records; None to let it grow with the number of updates.

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
    ) -> None:
        self.interval = interval or 1
        self._grows = interval is None
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
            "samples": self._samples_before_epoch + samples_in_epoch,
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
