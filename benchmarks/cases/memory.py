"""Memory of a run compared with the raw loop's, and what many runs in one process leave behind."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Callable
from functools import partial

from benchmarks.measuring import Result, Setting, Target, take_turns
from benchmarks.processes import forget_peak, in_new_process, peak_megabytes, resident_megabytes, things_held
from benchmarks.ways import OURS, AccelerateByHand, Ours, RawLoop, Way, unseen
from benchmarks.work import Job

WAYS: dict[str, Callable[[], Way]] = {
    RawLoop.library: RawLoop,
    AccelerateByHand.library: AccelerateByHand,
    OURS[0]: Ours,
    OURS[1]: partial(Ours, is_lean=False),
}


def run(setting: Setting) -> list[Result]:
    repeats = min(setting.repeats, 3)
    return [_peak(setting, repeats), *_growth(setting)]


def _peak(setting: Setting, repeats: int) -> Result:
    job = Job(samples=setting.size(60_000, quick=1_000), features=64, hidden=(1024,), kind="tensors")
    return Result(
        title="Memory of a run (MLP 64-1024-10, data in memory not counted)",
        unit="MB at the peak, above what was there before",
        rounds=take_turns({name: partial(in_new_process, peak_of_run, name, job) for name in WAYS}, repeats),
        baseline=RawLoop.library,
        compared_as="difference",
        targets=[Target(name, at_most=1) for name in OURS],
    )


def peak_of_run(name: str, job: Job) -> float:
    """Additional megabytes that this process needs for `job`."""
    way = WAYS[name]()
    # A narrower network first: everything is loaded then, and every bar has been drawn.
    way.run(dataclasses.replace(job, hidden=(1,)))
    parts, feed = job.parts(), job.feed()
    forget_peak()
    before = resident_megabytes()
    with unseen():
        way.train(parts, feed)
    return peak_megabytes() - before


def _growth(setting: Setting) -> list[Result]:
    runs = setting.size(200, quick=4)
    grown = {name: in_new_process(growth_over_runs, name, runs) for name in (RawLoop.library, *OURS)}
    circumstances = f"{runs} runs in one process, every tenth with loader processes"
    return [
        Result(
            title=f"Memory left behind by {circumstances}",
            unit="MB",
            rounds={name: [megabytes] for name, (megabytes, _) in grown.items()},
            baseline=RawLoop.library,
            compared_as="difference",
            targets=[Target(name, at_most=1) for name in OURS],
        ),
        Result(
            title=f"Things left behind by {circumstances}",
            unit="threads, open files and child processes",
            rounds={name: [float(held)] for name, (_, held) in grown.items()},
            targets=[Target(name, at_most=0) for name in OURS],
        ),
    ]


def growth_over_runs(name: str, runs: int) -> tuple[float, int]:
    """Additional megabytes, threads, files and processes of this process after `runs` runs."""
    way = WAYS[name]()
    in_memory = Job(samples=320, kind="tensors")
    with_workers = Job(samples=1_000, kind="rows", workers=1)
    jobs = [with_workers, *[in_memory] * 9]
    for number in range(10):
        way.run(jobs[number])
    before = resident_megabytes(), things_held()
    for number in range(runs):
        way.run(jobs[number % 10])
    gc.collect()
    return resident_megabytes() - before[0], things_held() - before[1]
