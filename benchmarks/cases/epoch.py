"""An epoch over data in memory, as a user would write it."""

from __future__ import annotations

from benchmarks.measuring import Result, Setting, Target, compare
from benchmarks.ways import OURS, AccelerateByHand, Ours, RawLoop, RawLoopOnWholeBatches
from benchmarks.work import Job


def run(setting: Setting) -> list[Result]:
    job = Job(samples=setting.size(60_000, quick=1_000), features=64, hidden=(128,), kind="tensors")
    return [
        compare(
            f"An epoch over {job.samples:,} samples in memory (MLP 64-128-10, batch 32)",
            job,
            [RawLoop(), RawLoopOnWholeBatches(), AccelerateByHand(), Ours(), Ours(is_lean=False), *setting.peers],
            min(setting.repeats, 5),
            # The samples come in different orders, so the losses are only close.
            tolerance=setting.size(0.05, quick=0.5),
            targets=[Target(name, at_most=0.75) for name in OURS],
            is_pictured=True,
        )
    ]
