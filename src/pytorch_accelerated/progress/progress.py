"""Counts the batches of a pass and regularly shows its progress."""

from __future__ import annotations

import collections
import time
from collections.abc import Callable, Mapping
from typing import Any

from pytorch_accelerated.progress.display import Display
from pytorch_accelerated.progress.snapshot import Snapshot

# Time between refreshes: reading a loss waits for the device.
_SECONDS_BETWEEN_FACTS = 1.0
# Time between looks at the clock, and the largest number of batches between them.
_SECONDS_BETWEEN_LOOKS = 0.02
_MAX_BATCHES_BETWEEN_LOOKS = 64
# The speed is measured over this many refreshes, about 10 seconds of a bar.
_REFRESHES_REMEMBERED = 50


def length_of(loader: Any) -> int | None:
    """The number of batches of a loader; None for a stream."""
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return None


class Progress:
    """One pass over some data. Call `advance` after each batch and `close` at the end, or use it in ``with``.

    Most of the time `advance` only counts; even the clock is read only every few batches.

    Args:
        label: describes the pass, such as "epoch 3/10".
        total: the number of batches in the pass, or None if unknown.
        display: shows the progress.
        samples_per_batch: samples of one batch over all ranks, for the throughput.
        read_facts: returns further text to show; called once a second at most, and may wait for the device.
        done: batches of this pass that were used before the run was resumed.
        unit: the unit that is counted, if not batches.
        clock: returns seconds.
    """

    def __init__(
        self,
        label: str,
        total: int | None,
        display: Display,
        *,
        samples_per_batch: int | None = None,
        read_facts: Callable[[], Mapping[str, str]] = dict,
        done: int = 0,
        unit: str = "batches",
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.label = label
        self.total = total
        self.done = done
        self._unit = unit
        self._display = display
        self._samples_per_batch = samples_per_batch
        self._read_facts = read_facts
        self._clock = clock
        self._facts: Mapping[str, str] = {}
        self._started = self._looked = clock()
        self._facts_due = self._started
        self._show_due = display.start(self._started)
        self._stride = 1
        self._look_at = done + 1
        self._past = collections.deque([(self._started, done)], maxlen=_REFRESHES_REMEMBERED)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def advance(self) -> None:
        """Count one more batch."""
        self.done += 1
        if self.done >= self._look_at:
            self._look()

    def close(self) -> None:
        """End the pass, finished or not."""
        self._display.close(self.done)

    def _look(self) -> None:
        now = self._clock()
        # While batches are quick, twice as many until the next look; once they are slow, every batch.
        quick = now - self._looked < _SECONDS_BETWEEN_LOOKS / 2
        self._stride = min(2 * self._stride, _MAX_BATCHES_BETWEEN_LOOKS) if quick else 1
        self._look_at = self.done + self._stride
        self._looked = now
        if now >= self._show_due:
            self._show(now)
        else:
            self._display.redraw()

    def _show(self, now: float) -> None:
        if now >= self._facts_due:
            self._facts = self._read_facts()
            self._facts_due = now + _SECONDS_BETWEEN_FACTS
        past, done_then = self._past[0]
        self._past.append((now, self.done))
        snapshot = Snapshot(
            label=self.label,
            done=self.done,
            total=self.total,
            seconds=now - self._started,
            batches_per_second=(self.done - done_then) / (now - past) if now > past else None,
            samples_per_batch=self._samples_per_batch,
            facts=self._facts,
            unit=self._unit,
        )
        self._show_due = self._display.show(snapshot, now)
