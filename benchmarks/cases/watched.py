"""What it costs a step that a run is shown: metrics, TensorBoard, a table in CSV, and a report."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks.measuring import Result, Setting, Target, measure_steps
from benchmarks.ways import OURS, Ours
from benchmarks.work import Feed, Job, Parts


class OursWatched(Ours):
    """This library with the callbacks of somebody who wants to see everything."""

    endings = ("", ", watched")

    def __init__(self) -> None:
        super().__init__(is_lean=False)
        self._folder = tempfile.TemporaryDirectory()

    def close(self) -> None:
        self._folder.cleanup()

    def _trainer(self, parts: Parts, feed: Feed) -> Any:
        from pytorch_accelerated.callbacks import (
            DEFAULT_CALLBACKS,
            CSVLoggerCallback,
            MetricsCallback,
            ReportCallback,
            TrackerCallback,
        )

        folder = Path(tempfile.mkdtemp(dir=self._folder.name))
        callbacks = [
            MetricsCallback({"accuracy": _accuracy}, predictions="argmax"),
            *DEFAULT_CALLBACKS,
            TrackerCallback("tensorboard", folder=folder / "tensorboard"),
            CSVLoggerCallback(folder / "log.csv"),
            ReportCallback(folder / "report.html"),
        ]
        return self._new_trainer(*parts, callbacks=callbacks)


def run(setting: Setting) -> list[Result]:
    short = Job(samples=32 * setting.size(2_000, quick=10))
    long = Job(samples=32 * setting.size(8_000, quick=50))
    watched = OursWatched()
    try:
        measured = measure_steps([Ours(is_lean=False), watched], short, long, setting.repeats, units_per_second=1e6)
    finally:
        watched.close()
    return [
        Result(
            title=(
                "A step of a run with metrics, TensorBoard, CSV and report (MLP 32-64-10, batch 32, slope between "
                f"{short.steps:,} and {long.steps:,} steps)"
            ),
            unit="µs per step",
            **measured,
            baseline=OURS[1],
            compared_as="difference",
            targets=[Target(watched.name, at_most=15)],
        )
    ]


def _accuracy(predictions: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (predictions == targets).float().mean()
