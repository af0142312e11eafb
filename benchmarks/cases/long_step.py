"""A step that itself takes long: what remains of the differences."""

from __future__ import annotations

from benchmarks.measuring import Result, Setting, Target, measure_steps
from benchmarks.ways import OURS, AccelerateByHand, Ours, RawLoop
from benchmarks.work import Job

STEP_SECONDS = 0.03


def run(setting: Setting) -> list[Result]:
    short = Job(samples=32 * setting.size(5, quick=1), step_seconds=STEP_SECONDS)
    long = Job(samples=32 * setting.size(25, quick=3), step_seconds=STEP_SECONDS)
    ways = [RawLoop(), AccelerateByHand(), Ours(), Ours(is_lean=False), *setting.lean_peers]
    return [
        Result(
            title=f"A step of {STEP_SECONDS * 1e3:g} ms (slope between {short.steps} and {long.steps} steps)",
            unit="ms per step",
            **measure_steps(ways, short, long, min(setting.repeats, 5), units_per_second=1e3),
            baseline=RawLoop.library,
            targets=[Target(name, at_most=1.005) for name in OURS],
        )
    ]
