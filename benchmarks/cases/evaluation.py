"""Evaluation: of data in memory as a user would write it, and on ready batches."""

from __future__ import annotations

import dataclasses
from functools import partial

from benchmarks.measuring import Result, Setting, Target, compare, losses_of_same_work, seconds_per_step, take_turns
from benchmarks.ways import OURS, AccelerateByHand, Ours, RawLoop, RawLoopOnWholeBatches, Way
from benchmarks.work import Job


def run(setting: Setting) -> list[Result]:
    in_memory = Job(
        samples=setting.size(60_000, quick=1_000),
        batch_size=256,
        features=64,
        hidden=(128,),
        kind="tensors",
        is_evaluation=True,
    )
    short = dataclasses.replace(in_memory, samples=256 * setting.size(100, quick=5), kind="ready batches")
    long = dataclasses.replace(short, samples=256 * setting.size(500, quick=10))
    ours = [Ours(), Ours(is_lean=False)]
    ways = [RawLoop(), RawLoopOnWholeBatches(), AccelerateByHand(), *ours, *setting.lean_peers]
    ready_ways = [RawLoop(), *ours]
    return [
        compare(
            f"Evaluation of {in_memory.samples:,} samples in memory (MLP 64-128-10, batch 256)",
            in_memory,
            ways,
            setting.repeats,
            # One library counts the short last batch as a whole one.
            tolerance=setting.size(1e-3, quick=0.1),
            targets=[Target(name, at_most=0.3) for name in OURS],
            is_pictured=True,
        ),
        Result(
            title=f"Evaluation of ready batches (slope between {short.steps} and {long.steps} of them)",
            unit="samples/s",
            more_is_better=True,
            final_losses=losses_of_same_work(ready_ways, short),
            rounds=take_turns(
                {way.name: partial(_samples_per_second, way, short, long) for way in ready_ways}, setting.repeats
            ),
            baseline=RawLoop.library,
            targets=[Target(OURS[0], at_least=0.98)],
        ),
    ]


def _samples_per_second(way: Way, short: Job, long: Job) -> float:
    return long.batch_size / seconds_per_step(way, short, long)
