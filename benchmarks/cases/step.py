"""The cost of a step above the raw loop, on batches that cost nothing to load."""

from __future__ import annotations

from benchmarks.measuring import Result, Setting, Target, measure_steps
from benchmarks.reference import Reference
from benchmarks.ways import OURS, AccelerateByHand, Ours, OursClippedAndScheduled, OursInHuggingFaceShape, RawLoop
from benchmarks.work import Job


def run(setting: Setting) -> list[Result]:
    short = Job(samples=32 * setting.size(300, quick=10))
    long = Job(samples=32 * setting.size(1500, quick=50))
    face = OursInHuggingFaceShape()
    ways = [RawLoop(), AccelerateByHand(), Ours(), Ours(is_lean=False), face, *setting.peers]
    faces = [OursClippedAndScheduled(), OursInHuggingFaceShape(clips_and_schedules=True)]
    native, hugging_face = (way.name for way in faces)
    bare, with_defaults = OURS
    return [
        Result(
            title=f"A step (MLP 32-64-10, batch 32, slope between {short.steps} and {long.steps} steps)",
            unit="µs per step",
            **measure_steps(ways, short, long, setting.repeats, units_per_second=1e6),
            baseline=RawLoop.library,
            compared_as="difference",
            targets=[
                Target(bare, at_most=20, below=[peer.name for peer in setting.peers]),
                Target(with_defaults, at_most=35, below=[peer.name for peer in setting.peers if not peer.is_lean]),
                Target(face.name, at_most=50, below=[peer.name for peer in setting.lean_peers]),
            ],
            note=f"{Reference.library} insists on a DataLoader around the batches, which is part of its figure.",
            is_pictured=True,
        ),
        Result(
            title="The same step by both faces, gradients clipped by their norm and a linear schedule",
            unit="µs per step",
            **measure_steps(faces, short, long, setting.repeats, units_per_second=1e6),
            baseline=native,
            compared_as="difference",
            targets=[Target(hugging_face, at_most=30)],
        ),
    ]
