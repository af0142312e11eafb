"""A step that itself takes long: what remains of the differences."""

from __future__ import annotations

from benchmarks.measuring import Result, Setting, Target, measure_steps
from benchmarks.ways import OURS, AccelerateByHand, Ours, OursInHuggingFaceShape, RawLoop, RawLoopClippedAndScheduled
from benchmarks.work import Job

STEP_SECONDS = 0.03


def run(setting: Setting) -> list[Result]:
    short = Job(samples=32 * setting.size(5, quick=1), step_seconds=STEP_SECONDS)
    long = Job(samples=32 * setting.size(25, quick=3), step_seconds=STEP_SECONDS)
    native = [RawLoop(), AccelerateByHand(), Ours(), Ours(is_lean=False), *setting.lean_peers]
    size = {"features": 512, "hidden": (768, 768, 768), "kind": "rows"}
    short_real = Job(samples=32 * setting.size(20, quick=1), **size)
    long_real = Job(samples=32 * setting.size(120, quick=3), **size)
    face = OursInHuggingFaceShape(is_lean=False, clips_and_schedules=True)
    repeats = min(setting.repeats, 5)
    return [
        Result(
            title=f"A step of {STEP_SECONDS * 1e3:g} ms (slope between {short.steps} and {long.steps} steps)",
            unit="ms per step",
            **measure_steps(native, short, long, repeats, units_per_second=1e3),
            baseline=RawLoop.library,
            targets=[Target(name, at_most=1.01) for name in OURS],
        ),
        Result(
            title=(
                f"A step of about 10 ms, with loading (MLP 512-768-768-768-10, batch 32, slope between "
                f"{short_real.steps} and {long_real.steps} steps)"
            ),
            unit="ms per step",
            **measure_steps([RawLoop(), Ours(), Ours(is_lean=False)], short_real, long_real, repeats, **_IN_MS),
            baseline=RawLoop.library,
            targets=[Target(name, at_most=1.01) for name in OURS],
        ),
        Result(
            title="The same with Hugging Face's defaults: clipped and scheduled, logged and saved",
            unit="ms per step",
            **measure_steps([RawLoopClippedAndScheduled(), face], short_real, long_real, repeats, **_IN_MS),
            baseline=RawLoopClippedAndScheduled.library,
            targets=[Target(face.name, at_most=1.03)],
        ),
    ]


_IN_MS = {"units_per_second": 1e3, "tolerance": 0.5}  # the samples come in different orders
