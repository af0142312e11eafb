"""States of a run on a GPU: how long a save stands in the way, and the bits after a resume."""

from __future__ import annotations

import os
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.data import ReadyBatches
from benchmarks.measuring import Result, Target, take_turns
from benchmarks.ways import unseen
from pytorch_accelerated import Trainer
from pytorch_accelerated.callbacks import SaveTrainingStateCallback, StopTrainingError, TrainerCallback

FLUSHED = "torch.save, flushed to the disk"
UPDATES_BETWEEN_SAVES = 20


class Border(TrainerCallback):
    """Times the gap between the second saved update and the next one, with the device idle at both ends."""

    seconds = 0.0

    def on_optimizer_step_end(self, trainer: Trainer, **kwargs: Any) -> None:
        if trainer.run_state.updates == 2 * UPDATES_BETWEEN_SAVES:
            _wait()
            self._end = time.perf_counter()

    def on_train_step_start(self, trainer: Trainer, **kwargs: Any) -> None:
        if trainer.run_state.updates == 2 * UPDATES_BETWEEN_SAVES:
            _wait()
            self.seconds = time.perf_counter() - self._end


def saves(device: torch.device, megabytes: int, repeats: int) -> Result:
    """The time that a run stands still for a save, beside torch.save of the same tensors."""
    width = int((megabytes * 2**20 / 12) ** 0.5)  # weights and both moments of Adam, in float32

    def parts() -> tuple[nn.Module, nn.Module, torch.optim.Optimizer]:
        model = nn.Linear(width, width).to(device)
        return model, nn.MSELoss(), torch.optim.Adam(model.parameters())

    rows = torch.randn(3 * UPDATES_BETWEEN_SAVES, width)

    def ours(folder: Path, **kwargs: Any) -> float:
        border = Border()
        saver = SaveTrainingStateCallback(
            folder, save_every_n_steps=UPDATES_BETWEEN_SAVES, save_at_end=False, max_checkpoints=1, **kwargs
        )
        with unseen():
            Trainer(*parts(), callbacks=[saver, border]).train(ReadyBatches(rows, rows, 1), num_epochs=1)
        return border.seconds

    def by_hand(path: Path, is_flushed: bool) -> float:
        model, loss_func, optimizer = parts()
        loss_func(model(rows[:1].to(device)), rows[:1].to(device)).backward()
        optimizer.step()
        _wait()
        start = time.perf_counter()
        with path.open("wb") as file:
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
            if is_flushed:
                file.flush()
                os.fsync(file.fileno())
        return time.perf_counter() - start

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        measures = {
            "torch.save": partial(by_hand, folder / "state.pt", False),
            FLUSHED: partial(by_hand, folder / "flushed.pt", True),
            "pytorch_accelerated": partial(ours, folder / "states"),
            "pytorch_accelerated, in the background": partial(ours, folder / "background", background=True),
        }
        take_turns(measures, 1)
        rounds = take_turns(measures, repeats)
    return Result(
        title=f"A save between two updates ({megabytes} MB of state on the device)",
        unit="s that the run stands still",
        rounds=rounds,
        baseline=FLUSHED,
        targets=[Target("pytorch_accelerated", at_most=1.25)],
    )


class StopAt(TrainerCallback):
    """Stops the run after an update."""

    def __init__(self, update: int) -> None:
        self._update = update

    def on_optimizer_step_end(self, trainer: Trainer, **kwargs: Any) -> None:
        if trainer.run_state.updates == self._update:
            raise StopTrainingError("stopped to be resumed")


def resumed_bits(device: torch.device, precision: str) -> str:
    """Whether a run with dropout, accumulation and an average that was stopped and resumed has the same weights."""
    inputs, targets = torch.randn(203, 32), torch.randint(10, (203,))

    def trained(folder: Path, *callbacks: TrainerCallback) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(32, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.3), nn.Linear(64, 10))
        saver = SaveTrainingStateCallback(folder, save_every_n_steps=5)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        trainer = Trainer(
            model,
            nn.CrossEntropyLoss(),
            optimizer,
            callbacks=[saver, *callbacks],
            mixed_precision=precision,
            seed=1,
        )
        with unseen():
            trainer.train(
                (inputs, targets),
                num_epochs=3,
                per_device_batch_size=16,
                gradient_accumulation_steps=2,
                resume_from=folder,
            )
        assert next(trainer.get_model().parameters()).device.type == device.type
        return [value.cpu() for value in trainer.get_model().state_dict().values()]

    with tempfile.TemporaryDirectory() as name:
        whole = trained(Path(name) / "whole")
        differing = []
        for update in (5, 9, 14):
            parts = Path(name) / f"parts-{update}"
            trained(parts, StopAt(update))
            resumed = trained(parts)
            if not all(map(torch.equal, whole, resumed)):
                differing.append(update)
    return f"resumed after {differing}: other bits" if differing else "resumed after updates 5, 9 and 14: the same bits"


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
