"""A user who says nothing about loader processes, and rows that cost little or much."""

from __future__ import annotations

import dataclasses

from benchmarks.comparing import shape
from benchmarks.measuring import Result, Setting, Target, compare
from benchmarks.ways import OURS, Ours, RawLoop
from benchmarks.work import ordinary_job

# The cost of a row beyond its indexing, and how many such rows are enough.
COSTS = {"cheap rows": (0.0, 20_000), "rows of 100 µs": (1e-4, 8_000), "rows of 1 ms": (1e-3, 4_000)}
COSTS["rows of 10 ms"] = (1e-2, 1_000)


def run(setting: Setting) -> list[Result]:
    return [_left_to_the_library(setting, rows, *cost) for rows, cost in COSTS.items()]


def _left_to_the_library(setting: Setting, rows: str, row_seconds: float, samples: int) -> Result:
    job = dataclasses.replace(
        ordinary_job(setting.size(samples, quick=64), workers=None),
        epochs=2,
        row_seconds=setting.size(row_seconds, quick=row_seconds / 100),
    )
    by_hand = [RawLoop(workers=0), RawLoop(workers=2)]
    is_slow = row_seconds > 1e-4
    return compare(
        f"Training on an ordinary dataset, {rows}, the number of workers left to the library ({shape(job)})",
        job,
        [*by_hand, Ours(), Ours(is_lean=False), *(() if is_slow else setting.peers)],
        min(setting.repeats, 3) if is_slow else setting.repeats,
        tolerance=setting.size(0.1, quick=0.5),  # other orders
        baselines=[way.name for way in by_hand],
        targets=[Target(name, at_most=1.08) for name in OURS],
        note="Compared with the faster one of the hand-written loops.",
    )
