"""Measures the time of training epochs and of waiting for data, and spaces actions evenly in time."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple


class EpochTiming(NamedTuple):
    """The time of one training epoch on this rank, without evaluations and saves inside it.

    Attributes:
        epoch: counted from 1.
        seconds: from its first to its last update.
        data_wait_seconds: the part in which the loop waited for the next batch. On a GPU, the run loses less than this,
            since the GPU may still be working while the loop waits.
        num_workers: worker processes that fetched the last batch; None if unknown.
    """

    epoch: int
    seconds: float
    data_wait_seconds: float
    num_workers: int | None = None

    @property
    def data_wait_share(self) -> float:
        """The share of waiting in the time of the epoch, between 0 and 1."""
        return self.data_wait_seconds / self.seconds if self.seconds else 0.0


class Pace:
    """Schedules an action after certain updates, so that it happens about every `seconds`, at first after each update.

    An agreement of ranks takes a fraction of a millisecond: too long for each update, but negligible now and then. All
    ranks must act after the same update, so one of them proposes when, and all follow its proposal.

    Args:
        seconds: the intended time between two actions.
        clock: returns seconds.
    """

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds = seconds
        self._clock = clock
        self.restart(0)

    def restart(self, updates: int) -> None:
        """Start again after `updates`: the action is due after the next one."""
        self._between = 1
        self.go_on(updates, 1)

    def is_due(self, updates: int) -> bool:
        """Whether the action is due after `updates`."""
        return updates >= self._due

    def proposal(self, updates: int) -> int:
        """The number of updates until the next action by this rank's clock, at most twice the last one."""
        per_second = (updates - self._last) / max(self._clock() - self._looked_at, 1e-9)
        return max(1, min(2 * self._between, int(per_second * self._seconds)))

    def go_on(self, updates: int, between: int) -> None:
        """Record that the action happened after `updates`; the next one is due `between` updates later."""
        self._looked_at = self._clock()
        self._last, self._between, self._due = updates, between, updates + between


class EpochClock:
    """Measures the time of one training epoch, from its construction on.

    Args:
        epoch: counted from 1.

    Attributes:
        epoch: counted from 1.
    """

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self._started = time.perf_counter()
        self._paused_seconds = 0.0
        self._source: Any = None
        self._waited_before = 0.0

    def watch(self, source: Any) -> None:
        """Count the seconds in `source.waiting` from now on; `source.num_workers` processes fetch its batches."""
        self._source, self._waited_before = source, source.waiting.seconds

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude the time of the block from the epoch."""
        paused = time.perf_counter()
        try:
            yield
        finally:
            self._paused_seconds += time.perf_counter() - paused

    def read(self) -> EpochTiming:
        """The time so far."""
        source = self._source
        waited, workers = 0.0, None
        if source is not None:
            waited, workers = source.waiting.seconds - self._waited_before, source.num_workers
        return EpochTiming(self.epoch, time.perf_counter() - self._started - self._paused_seconds, waited, workers)
