"""How long a save holds up the run."""

from __future__ import annotations

import inspect
import os
import shutil
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.measuring import Result, Setting, Target, take_turns
from benchmarks.ways import RawLoop, unseen
from benchmarks.work import CLASSES, Parts, ReadyBatches
from pytorch_accelerated.callbacks.base import TrainerCallback
from pytorch_accelerated.callbacks.saving import SaveTrainingStateCallback
from pytorch_accelerated.trainer import Trainer

SAVE_AT = 3


class BorderClock(TrainerCallback):
    """Times what happens between the end of the update that is saved and the next step."""

    seconds = 0.0

    def on_optimizer_step_end(self, trainer: Trainer, **kwargs: Any) -> None:
        self._start = time.perf_counter()

    def on_train_step_start(self, trainer: Trainer, **kwargs: Any) -> None:
        if trainer.run_state.updates == SAVE_AT:
            self.seconds = time.perf_counter() - self._start


def run(setting: Setting) -> list[Result]:
    features = setting.size(2900, quick=64)
    parts = _parts(features)
    batches = _batches(features)
    state_megabytes = 3 * sum(parameter.numel() for parameter in parts.model.parameters()) * 4 / 2**20
    with tempfile.TemporaryDirectory(dir=setting.folder) as folder:
        path = Path(folder)
        measures = {
            "torch.save": partial(_seconds_of_torch_save, parts, path / "state.pt", is_flushed=False),
            "torch.save, flushed to the disk": partial(
                _seconds_of_torch_save, parts, path / "state.pt", is_flushed=True
            ),
            "ours": partial(_seconds_of_stall, parts, batches, path / "states"),
        }
        targets = []
        if "background" in inspect.signature(SaveTrainingStateCallback).parameters:
            in_background = partial(_seconds_of_stall, parts, batches, path / "states", background=True)
            measures["ours, in the background"] = in_background
            targets.append(Target("ours, in the background", at_most=0.2))
        RawLoop().train(parts, batches, 1)  # Adam's state exists from here on
        take_turns(measures, 1)  # warms up
        return [
            Result(
                title=f"A save between two steps ({state_megabytes:.0f} MB of state)",
                unit="s that the run stands still",
                rounds=take_turns(measures, setting.repeats),
                baseline="torch.save",
                targets=targets,
                note="Ours writes checksums and flushes to the disk; a torch.save that does not can be lost.",
            )
        ]


def _parts(features: int) -> Parts:
    model = nn.Sequential(nn.Linear(features, features), nn.Linear(features, CLASSES))
    return Parts(model, nn.CrossEntropyLoss(), torch.optim.Adam(model.parameters()))


def _batches(features: int) -> ReadyBatches:
    return ReadyBatches(torch.randn(SAVE_AT + 2, features), torch.zeros(SAVE_AT + 2, dtype=torch.int64), 1)


def _seconds_of_torch_save(parts: Parts, path: Path, *, is_flushed: bool) -> float:
    path.unlink(missing_ok=True)
    start = time.perf_counter()
    with path.open("wb") as file:
        torch.save({"model": parts.model.state_dict(), "optimizer": parts.optimizer.state_dict()}, file)
        if is_flushed:
            file.flush()
            os.fsync(file.fileno())
    return time.perf_counter() - start


def _seconds_of_stall(parts: Parts, batches: ReadyBatches, folder: Path, **kwargs: Any) -> float:
    clock = BorderClock()
    saver = SaveTrainingStateCallback(folder, save_every_n_steps=SAVE_AT, save_at_end=False, **kwargs)
    with unseen():
        Trainer(*parts, callbacks=[saver, clock]).train(batches, num_epochs=1)
    shutil.rmtree(folder)
    return clock.seconds
