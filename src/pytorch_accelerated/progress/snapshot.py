"""How far a pass over some data is, in numbers and in words."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

from pytorch_accelerated.progress.formats import format_clock, format_number


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """One look at a pass over some data.

    Attributes:
        label: what is going on, such as "epoch 3/10".
        done: batches of this rank.
        total: batches that the pass will have, or None for a stream.
        seconds: time since the pass began.
        batches_per_second: recent speed, or None before there is one.
        samples_per_batch: samples of one batch over all ranks, or None if that is not known.
        facts: what else to show, such as the loss so far, ready to print.
        unit: what is counted, if it is not batches.
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
        """At the recent speed; None if nobody knows."""
        if self.total is None or not self.batches_per_second:
            return None
        return max(self.total - self.done, 0) / self.batches_per_second

    @property
    def time_left(self) -> str:
        """For example "01:30"; empty if nobody knows."""
        return "" if self.seconds_left is None else format_clock(self.seconds_left)

    @property
    def throughput(self) -> str:
        """For example "11680 samples/s", or in batches where the samples of a batch are not known."""
        if not self.batches_per_second:
            return ""
        if self.samples_per_batch is None:
            return f"{format_number(self.batches_per_second)} {self.unit}/s"
        return f"{format_number(self.batches_per_second * self.samples_per_batch)} samples/s"
