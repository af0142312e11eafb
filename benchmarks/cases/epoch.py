"""An epoch over data in memory, as a user would write it."""

from __future__ import annotations

from functools import partial

from benchmarks.measuring import Result, Setting, Target, losses_of_same_work, take_turns
from benchmarks.ways import OURS, AccelerateByHand, Ours, RawLoop, RawLoopOnWholeBatches, Way
from benchmarks.work import Job


def run(setting: Setting) -> list[Result]:
    job = Job(samples=setting.size(60_000, quick=1_000), features=64, hidden=128, is_ready=False)
    ways = [
        *(RawLoop(), RawLoopOnWholeBatches(), AccelerateByHand(), Ours(), Ours(is_lean=False)),
        *setting.peers,
    ]
    # The samples come in different orders, so the losses are only close.
    losses = losses_of_same_work(ways, job, tolerance=setting.size(0.05, quick=0.5))
    return [
        Result(
            title=f"An epoch over {job.samples:,} samples in memory (MLP 64-128-10, batch 32)",
            unit="s",
            rounds=take_turns({way.name: partial(_seconds, way, job) for way in ways}, min(setting.repeats, 5)),
            baseline=RawLoop.library,
            targets=[Target(name, at_most=0.8) for name in OURS],
            final_losses=losses,
            is_pictured=True,
        )
    ]


def _seconds(way: Way, job: Job) -> float:
    return way.run(job).seconds
