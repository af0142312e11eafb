"""How long training epochs take, and how much of that goes by waiting for data."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
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
