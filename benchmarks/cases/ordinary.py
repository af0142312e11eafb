"""The dataset that most people write, with `__getitem__` and no more: its rows are fetched one by one."""

from __future__ import annotations

import dataclasses

from benchmarks.comparing import evaluation_of, training_on
from benchmarks.measuring import Result, Setting, Target
from benchmarks.ways import OURS
from benchmarks.work import ordinary_job


def run(setting: Setting) -> list[Result]:
    rows = ordinary_job(setting.size(20_000, quick=320), workers=0)
    of_100_us = dataclasses.replace(rows, samples=setting.size(8_000, quick=320), row_seconds=1e-4)
    random_rows = dataclasses.replace(rows, kind="random rows")
    bare, with_defaults = OURS
    without_workers = [Target(bare, at_most=1.1), Target(with_defaults, at_most=1.13)]
    random = [Target(name, at_most=1.12) for name in OURS]
    parallel = [Target(name, at_most=1.05) for name in OURS]
    what, augmented = "an ordinary dataset, cheap rows", "an ordinary dataset, rows with random augmentation"
    return [
        training_on(what, rows, setting, targets=without_workers, is_pictured=True),
        training_on("an ordinary dataset, rows of 100 µs", of_100_us, setting, targets=without_workers),
        training_on(augmented, random_rows, setting, targets=random),
        training_on(what, dataclasses.replace(rows, workers=2, epochs=2), setting, targets=parallel),
        training_on(augmented, dataclasses.replace(random_rows, workers=2, epochs=2), setting, targets=parallel),
        evaluation_of(what, rows, setting, targets=[Target(name, at_most=1.1) for name in OURS]),
    ]
