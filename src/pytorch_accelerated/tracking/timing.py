"""How long training epochs take, how much of that goes by waiting for data, and what is done about so often."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol


class EpochTiming(NamedTuple):
    """The time of one training epoch on this rank, without evaluations and saves inside it.

    Attributes:
        epoch: counted from 1.
        seconds: from its first to its last update.
        data_wait_seconds: the part in which the loop waited for the next batch. On a GPU that is more than what the
            run loses by it: while the loop waits, the GPU may still be at work.
    """

    epoch: int
    seconds: float
    data_wait_seconds: float

    @property
    def data_wait_share(self) -> float:
        """Between 0 and 1."""
        return self.data_wait_seconds / self.seconds if self.seconds else 0.0


class Pace:
    """Spreads something over updates, so that it happens about every so many seconds, after each update at first.

    Ranks agree in a fraction of a millisecond. That is too long for each update, and nothing now and then. So that all
    ranks do it after the same update, one of them proposes, and all go on with what it says.

    Args:
        seconds: between two times.
        clock: returns seconds.
    """

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds = seconds
        self._clock = clock
        self.restart(0)

    def restart(self, updates: int) -> None:
        """Begin again after `updates`, with the next one."""
        self._between = 1
        self.go_on(updates, 1)

    def is_due(self, updates: int) -> bool:
        """Whether it is time, after `updates`."""
        return updates >= self._due

    def proposal(self, updates: int) -> int:
        """Updates until the next time, by this rank's clock; never many more than last time."""
        per_second = (updates - self._last) / max(self._clock() - self._looked_at, 1e-9)
        return max(1, min(2 * self._between, int(per_second * self._seconds)))

    def go_on(self, updates: int, between: int) -> None:
        """It has happened after `updates`; the next time is `between` updates later."""
        self._looked_at = self._clock()
        self._last, self._between, self._due = updates, between, updates + between


class Waiting(Protocol):
    """Counts seconds of waiting."""

    seconds: float


class EpochClock:
    """Takes the time of one training epoch from the moment it is made.

    Args:
        epoch: counted from 1.
    """

    def __init__(self, epoch: int) -> None:
        self._epoch = epoch
        self._started = time.perf_counter()
        self._paused_seconds = 0.0
        self._waiting: Waiting | None = None
        self._waited_before = 0.0

    def watch(self, waiting: Waiting) -> None:
        """Count what is waited from now on."""
        self._waiting, self._waited_before = waiting, waiting.seconds

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """What happens inside does not belong to the epoch."""
        paused = time.perf_counter()
        try:
            yield
        finally:
            self._paused_seconds += time.perf_counter() - paused

    def read(self) -> EpochTiming:
        """The time so far."""
        waited = 0.0 if self._waiting is None else self._waiting.seconds - self._waited_before
        return EpochTiming(self._epoch, time.perf_counter() - self._started - self._paused_seconds, waited)
