"""Prediction: its time, and the memory of a pass that writes far more than fits into memory."""

from __future__ import annotations

import itertools
import tempfile
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

from benchmarks.data import Batch
from benchmarks.measuring import Result, Setting, Target, take_turns
from benchmarks.processes import forget_peak, in_new_process, peak_megabytes, resident_megabytes
from benchmarks.ways import RawLoopOnWholeBatches
from benchmarks.work import Job
from pytorch_accelerated.trainer import Trainer

OUTPUTS = 1024  # float32, so that a row has 4 KiB


def run(setting: Setting) -> list[Result]:
    with tempfile.TemporaryDirectory(dir=setting.folder) as folder:
        return [_times(setting, Path(folder)), _memory(setting, Path(folder))]


def _times(setting: Setting, folder: Path) -> Result:
    job = Job(samples=setting.size(60_000, quick=1_000), batch_size=256, features=64, hidden=(128,), kind="tensors")
    model, loss_func, optimizer = job.parts()
    feed = job.feed()
    trainer = Trainer(model, loss_func, optimizer, callbacks=())
    new_loaders: dict[str, Callable[[], Iterable[Batch]]] = {
        "by hand, DataLoader": partial(feed.loader, shuffle=False),
        "by hand, whole-batch indexing": partial(RawLoopOnWholeBatches().batches, feed, shuffle=False),
    }
    passes = {name: partial(_predictions, model, new_loader) for name, new_loader in new_loaders.items()}
    passes["ours"] = partial(trainer.predict, feed.data, job.batch_size)
    expected = passes["by hand, DataLoader"]()
    for predict in passes.values():
        torch.testing.assert_close(predict(), expected)
    new_folders = (folder / str(number) for number in itertools.count())
    passes["ours, to disk"] = lambda: trainer.predict(feed.data, job.batch_size, output_path=next(new_folders))
    return Result(
        title=f"Prediction for {job.samples:,} samples in memory (MLP 64-128-10, batch {job.batch_size})",
        unit="s",
        rounds=take_turns({name: partial(_seconds, predict) for name, predict in passes.items()}, setting.repeats),
        baseline="by hand, DataLoader",
    )


def _memory(setting: Setting, folder: Path) -> Result:
    budget = setting.size(64, quick=1)
    cases = {
        "ours to disk, one budget": (budget, folder),
        "ours to disk, ten budgets": (10 * budget, folder),
        "ours in memory, ten budgets": (10 * budget, None),
    }
    return Result(
        title=f"Memory of a prediction (a budget: {budget} MB of predictions)",
        unit="MB at the peak, above what was there before",
        rounds=take_turns(
            {name: partial(in_new_process, megabytes_to_predict, *case) for name, case in cases.items()},
            min(setting.repeats, 2),
        ),
        baseline="ours to disk, one budget",
        compared_as="difference",
        targets=[Target("ours to disk, ten budgets", at_most=0.1 * budget)],
    )


def megabytes_to_predict(size_megabytes: int, folder: Path | None) -> float:
    """Additional memory of this process to predict `size_megabytes`, in memory or to a new folder in `folder`."""
    model = nn.Linear(1, OUTPUTS)
    rows = size_megabytes * 2**20 // (4 * OUTPUTS)
    trainer = Trainer(model, nn.MSELoss(), torch.optim.SGD(model.parameters()), callbacks=())
    trainer.predict(TensorDataset(torch.zeros(256, 1)), per_device_batch_size=256)  # loaded by the first pass
    forget_peak()
    before = resident_megabytes()
    with tempfile.TemporaryDirectory(dir=folder) as parent:
        output_path = None if folder is None else Path(parent) / "predictions"
        trainer.predict(TensorDataset(torch.zeros(rows, 1)), per_device_batch_size=256, output_path=output_path)
    return peak_megabytes() - before


def _predictions(model: nn.Module, new_loader: Callable[[], Iterable[Batch]]) -> torch.Tensor:
    model.eval()
    with torch.no_grad():
        return torch.cat([model(inputs) for inputs, _ in new_loader()])


def _seconds(function: Callable[[], Any]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start
