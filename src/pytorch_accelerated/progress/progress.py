"""Counts the batches of a pass and, now and then, shows how far it is."""

from __future__ import annotations

import collections
import time
from collections.abc import Callable, Mapping

from pytorch_accelerated.progress.display import Display
from pytorch_accelerated.progress.snapshot import Snapshot

# How long the device may run ahead undisturbed: reading a loss waits for it.
_SECONDS_BETWEEN_FACTS = 1.0
# The clock is read this often in time, and at the latest after so many batches.
_SECONDS_BETWEEN_LOOKS = 0.02
_MAX_BATCHES_BETWEEN_LOOKS = 64
# The speed is that of the last refreshes, about 10 seconds of a bar.
_REFRESHES_REMEMBERED = 50


class Progress:
    """One pass over some data. Call `advance` after each batch and `close` at the end, or use it in ``with``.

    `advance` counts and does nothing else most of the time; even the clock is read only every few batches.

    Args:
        label: what is going on, such as "epoch 3/10".
        total: batches that the pass will have, or None if nobody knows.
        display: where to show it.
        samples_per_batch: samples of one batch over all ranks, for the throughput.
        read_facts: returns what else to show, ready to print; called once a second at most, and may wait for the
            device.
        done: batches of this pass that were used before, in the run that is being resumed.
        unit: what is counted, if it is not batches.
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
        """The pass is over, or given up."""
        self._display.close()

    def _look(self) -> None:
        now = self._clock()
        # Twice as many batches until the next look while they are quick; every batch as soon as they are not.
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
