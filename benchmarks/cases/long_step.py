"""A step that itself takes long: what remains of the differences."""

from __future__ import annotations

from functools import partial

from benchmarks.measuring import Result, Setting, Target, losses_of_same_work, seconds_per_step, take_turns
from benchmarks.ways import OURS, AccelerateByHand, Ours, RawLoop, Way
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
            final_losses=losses_of_same_work(ways, short),
            rounds=take_turns(
                {way.name: partial(_milliseconds, way, short, long) for way in ways}, min(setting.repeats, 5)
            ),
            baseline=RawLoop.library,
            targets=[Target(name, at_most=1.005) for name in OURS],
        )
    ]


def _milliseconds(way: Way, short: Job, long: Job) -> float:
    return seconds_per_step(way, short, long) * 1e3
