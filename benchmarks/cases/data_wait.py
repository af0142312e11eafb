"""The share of time that a run waits for data, which a better loop could save."""

from __future__ import annotations

from functools import partial

from benchmarks.measuring import Result, Setting, losses_of_same_work, seconds_per_step, take_turns
from benchmarks.ways import Ours, RawLoop, Way
from benchmarks.work import Job

STEP_SECONDS = 0.008
ROW_SECONDS = 0.0002


def run(setting: Setting) -> list[Result]:
    short, long = (
        Job(samples=size, kind="waiting rows", workers=1, step_seconds=STEP_SECONDS, row_seconds=ROW_SECONDS)
        for size in (setting.size(1_024, quick=64), setting.size(4_096, quick=128))
    )
    ways = [RawLoop(workers=0), RawLoop(workers=1), Ours(), Ours(is_lean=False)]
    return [
        Result(
            title=(
                f"Waiting (a step computes {STEP_SECONDS * 1e3:g} ms, a batch of 32 samples takes "
                f"{32 * ROW_SECONDS * 1e3:g} ms to fetch)"
            ),
            unit="% of the run that is not that computation",
            final_losses=losses_of_same_work(ways, short, tolerance=0.5),  # other orders
            rounds=take_turns({way.name: partial(_percent, way, short, long) for way in ways}, min(setting.repeats, 5)),
            note="Ours has one worker.",
        )
    ]


def _percent(way: Way, short: Job, long: Job) -> float:
    return 100 * (1 - STEP_SECONDS / seconds_per_step(way, short, long))
