"""The dataset that most people write, with `__getitem__` and no more: its rows are fetched one by one."""

from __future__ import annotations

import dataclasses

from benchmarks.measuring import Result, Setting, Target, compare
from benchmarks.ways import OURS, AccelerateByHand, Ours, RawLoop
from benchmarks.work import Job

WORKERS = 2
# The cost of a row beyond its indexing, in words, in seconds, and how many such rows are enough.
COSTS = (
    ("of 5 µs", 0.0, 20_000),
    ("of 100 µs", 1e-4, 8_000),
    ("of 1 ms", 1e-3, 4_000),
    ("of 10 ms", 1e-2, 1_000),
)


def run(setting: Setting) -> list[Result]:
    samples = setting.size(20_000, quick=320)
    rows = Job(samples=samples, features=64, hidden=(128, 64), kind="rows", workers=0)
    with_workers = dataclasses.replace(rows, workers=WORKERS, epochs=2)
    of_100_us = dataclasses.replace(rows, samples=setting.size(8_000, quick=320), row_seconds=1e-4)
    bare, with_defaults = OURS
    return [
        _training(
            setting,
            "rows of 5 µs",
            rows,
            Target(bare, at_most=1),
            Target(with_defaults, at_most=1.03),
            is_pictured=True,
        ),
        _training(setting, "rows of 100 µs", of_100_us, Target(bare, at_most=1), Target(with_defaults, at_most=1.03)),
        _training(
            setting,
            "rows with random augmentation",
            dataclasses.replace(rows, kind="random rows"),
            *_both(at_most=1.05),
        ),
        _training(setting, "rows of 5 µs", with_workers, *_both(at_most=1.02)),
        _training(setting, "rows with random augmentation", dataclasses.replace(with_workers, kind="random rows")),
        *(_left_to_the_library(setting, *cost) for cost in COSTS),
        _evaluation(setting, dataclasses.replace(rows, batch_size=256, is_evaluation=True)),
    ]


def _both(*, at_most: float) -> list[Target]:
    return [Target(name, at_most=at_most) for name in OURS]


def _training(setting: Setting, rows: str, job: Job, *targets: Target, is_pictured: bool = False) -> Result:
    return compare(
        f"Ordinary dataset, {rows}, {job.workers} workers ({_circumstances(job)})",
        job,
        [RawLoop(), AccelerateByHand(), Ours(), Ours(is_lean=False), *setting.peers],
        setting.repeats,
        tolerance=setting.size(0.05, quick=0.5),  # other orders
        targets=targets,
        is_pictured=is_pictured,
    )


def _left_to_the_library(setting: Setting, rows: str, row_seconds: float, samples: int) -> Result:
    job = Job(
        samples=setting.size(samples, quick=64),
        features=64,
        hidden=(128, 64),
        kind="rows",
        epochs=2,
        row_seconds=setting.size(row_seconds, quick=min(row_seconds, 1e-4)),
    )
    by_hand = [RawLoop(workers=0), RawLoop(workers=WORKERS)]
    return compare(
        f"Ordinary dataset, rows {rows}, the number of workers left to the library ({_circumstances(job)})",
        job,
        [*by_hand, Ours(), Ours(is_lean=False), *(setting.peers if row_seconds < 1e-3 else ())],
        min(setting.repeats, 3) if row_seconds >= 1e-3 else setting.repeats,
        tolerance=setting.size(0.1, quick=0.5),
        baselines=[way.name for way in by_hand],
        targets=_both(at_most=1.02),
        note="Compared with the better of the hand-written loops.",
    )


def _evaluation(setting: Setting, job: Job) -> Result:
    return compare(
        f"Evaluation of an ordinary dataset, rows of 5 µs, {job.workers} workers ({_circumstances(job)})",
        job,
        [RawLoop(), AccelerateByHand(), Ours(), Ours(is_lean=False), *setting.lean_peers],
        setting.repeats,
        # One library counts the short last batch as a whole one.
        tolerance=setting.size(1e-2, quick=0.2),
        targets=_both(at_most=0.95),
    )


def _circumstances(job: Job) -> str:
    epochs = f", {job.epochs} epochs" if job.epochs > 1 else ""
    return f"MLP 64-128-64-10, {job.samples:,} rows, batch {job.batch_size}{epochs}"
