"""The progress of a pass over some data, in numbers and in words."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

from pytorch_accelerated.progress.formats import format_clock, format_rate


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
