"""The progress of a pass over some data: counted, and shown regularly."""

from __future__ import annotations

import collections
import dataclasses
import math
import time
from collections.abc import Callable, Mapping
from typing import Protocol

from pytorch_accelerated.progress.formats import format_clock, format_rate
from pytorch_accelerated.progress.screen import printable

# Time between refreshes: reading a loss waits for the device.
_SECONDS_BETWEEN_FACTS = 1.0
# The speed is measured over this many refreshes, about 10 seconds of a bar.
_REFRESHES_REMEMBERED = 50


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """The state of a pass at one moment.

    Attributes:
        label: describes the pass, such as "epoch 3/10".
        done: finished batches of this rank.
        total: the number of batches in the pass, or None for a stream.
        seconds: time since the pass began.
        batches_per_second: recent speed, or None if there is none yet.
        samples_per_batch: samples of one batch over all ranks, or None if unknown.
        facts: further text to show, such as the loss so far.
        unit: the unit that is counted, if not batches.
    """

    label: str
    done: int
    total: int | None
    seconds: float
    batches_per_second: float | None
    samples_per_batch: int | None
    facts: Mapping[str, str]
    unit: str = "batches"

    @property
    def count(self) -> str:
        """For example "450/1000"."""
        return f"{self.done} {self.unit}" if self.total is None else f"{self.done}/{self.total}"

    @property
    def percentage(self) -> str:
        """For example "45%"; empty for a stream."""
        return f"{math.floor(100 * self.done / self.total)}%" if self.total else ""

    @property
    def seconds_left(self) -> float | None:
        """The remaining time at the recent speed; None if unknown."""
        if self.total is None or not self.batches_per_second:
            return None
        return max(self.total - self.done, 0) / self.batches_per_second

    @property
    def time_left(self) -> str:
        """For example "01:30"; empty if unknown."""
        return "" if self.seconds_left is None else format_clock(self.seconds_left)

    @property
    def throughput(self) -> str:
        """For example "11680 samples/s", or batches per second if the number of samples is unknown."""
        if not self.batches_per_second:
            return ""
        if self.samples_per_batch is None:
            return f"{format_rate(self.batches_per_second)} {self.unit}/s"
        return f"{format_rate(self.batches_per_second * self.samples_per_batch)} samples/s"


class Display(Protocol):
    """Shows one pass over some data. All times are those of `time.perf_counter`."""

    def start(self, now: float) -> float:
        """Called when a pass begins. Returns the time of the first `show`."""

    def show(self, snapshot: Snapshot, now: float) -> float:
        """Show the progress of the pass. Returns the time of the next `show`."""

    def close(self, done: int) -> None:
        """Called when the pass is over, with `done` batches. Nothing may stay that later output would overwrite."""


class Progress:
    """One pass over some data. Call `advance` after each batch and `close` at the end.

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
        self.label = printable(label)
        self.total = total
        self.done = done
        self._unit = unit
        self._display = display
        self._samples_per_batch = samples_per_batch
        self._read_facts = read_facts
        self._clock = clock
        self._facts: Mapping[str, str] = {}
        self._started = clock()
        self._facts_due = self._started
        self._show_due = display.start(self._started)
        self._past = collections.deque([(self._started, done)], maxlen=_REFRESHES_REMEMBERED)

    def advance(self) -> None:
        """Count one more batch."""
        self.done += 1
        now = self._clock()
        if now >= self._show_due:
            self._show(now)

    def close(self) -> None:
        """End the pass, finished or not."""
        self._display.close(self.done)

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
