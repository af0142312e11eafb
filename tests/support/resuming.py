"""One run, uninterrupted or resumed, with every kind of state."""

import functools
import hashlib
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import Dataset

from pytorch_accelerated import Trainer
from pytorch_accelerated.callbacks import (
    EarlyStoppingCallback,
    ModelEmaCallback,
    SaveBestModelCallback,
    TrainerCallback,
)
from pytorch_accelerated.errors import StopTrainingError
from tests.support.histories import state_without_times
from tests.support.reference import regression_data


class AugmentedData(Dataset[Any]):
    """Rows with noise of all three generators that user code draws from."""

    def __init__(self, size: int) -> None:
        self.inputs, self.targets = regression_data(size)

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> Any:
        noise = torch.rand(3, dtype=torch.float64) + np.random.rand() + random.random()
        return self.inputs[index] + 0.1 * noise, self.targets[index]


class SaveAndStop(TrainerCallback):
    """Saves after `updates` updates and ends the run there, as a kill would."""

    def __init__(self, folder: Path, updates: int) -> None:
        self.folder = folder
        self.updates = updates

    def on_optimizer_step_end(self, trainer: Trainer, **kwargs: Any) -> None:
        if trainer.run_state.updates == self.updates:
            trainer.save_training_state(self.folder, {"note": "interrupted"})
            raise StopTrainingError


class SaveAtEpochEnd(SaveAndStop):
    """Saves and ends the run after `updates` epochs, when everything in the epoch is done."""

    def on_optimizer_step_end(self, trainer: Trainer, **kwargs: Any) -> None:
        pass

    def on_training_run_epoch_end(self, trainer: Trainer, **kwargs: Any) -> None:
        if trainer.run_history.current_epoch == self.updates:
            trainer.save_training_state(self.folder)
            raise StopTrainingError


def run(
    folder: Path,
    *extra: TrainerCallback,
    seed: int | None = 11,
    num_workers: int = 0,
    accumulation: int = 2,
    rows: int = 22,
    process_seed: int = 0,
    **arguments: Any,
) -> tuple[Trainer, ModelEmaCallback]:
    """Three epochs over `rows` rows; dropout, batch norm, momentum, a schedule, EMA, early stopping, best model.

    `process_seed` simulates earlier work of the process: a resumed run must not depend on it.
    """
    torch.manual_seed(process_seed)
    model = nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.Dropout(0.3), nn.Tanh(), nn.Linear(6, 2)).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    ema = ModelEmaCallback(decay=0.8, save_path=folder / "ema.pt")
    callbacks = [ema, EarlyStoppingCallback(5), SaveBestModelCallback(folder / "best.pt"), *extra]
    trainer = Trainer(model, nn.MSELoss(), optimizer, callbacks=callbacks, seed=seed)
    trainer.train(
        AugmentedData(rows),
        num_epochs=3,
        eval_dataset=regression_data(5),
        per_device_batch_size=3,
        gradient_accumulation_steps=accumulation,
        train_dataloader_kwargs={"num_workers": num_workers},
        **{"create_scheduler_fn": functools.partial(OneCycleLR, max_lr=0.05, total_steps=30), **arguments},
    )
    return trainer, ema


def everything(trainer: Trainer, ema: ModelEmaCallback) -> dict[str, Any]:
    """All results that must be the same in the end, bit for bit."""
    return {
        "model": trainer.model.state_dict(),
        "optimizer": trainer.optimizer.state_dict(),
        "scheduler": trainer.scheduler.state_dict(),
        "ema": ema.state_dict(),
        "history": state_without_times(trainer.run_history),
        "run_state": trainer.run_state.state_dict(),
        "torch": torch.default_generator.get_state(),
        "numpy": torch.from_numpy(np.random.get_state(legacy=False)["state"]["key"].astype(np.int64)),
    }


def digests(state: dict[str, Any], folder: Path | None = None) -> dict[str, str]:
    """A few characters for each part, which differ if any bit of it does. The path of `folder` does not matter."""
    texts = {name: repr(_plain(part)).replace(str(folder), "") for name, part in state.items()}
    return {name: hashlib.sha256(text.encode()).hexdigest()[:16] for name, text in texts.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items() if not callable(item)}
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def assert_same(actual: Any, expected: Any, path: str = "", *, tolerance: float = 0.0) -> None:
    """Fail at the first difference between two values of `everything`; functions are not compared."""
    if tolerance and isinstance(expected, (torch.Tensor, float)):
        values = torch.as_tensor(actual), torch.as_tensor(expected)
        torch.testing.assert_close(*values, rtol=tolerance, atol=tolerance, msg=path)
    elif isinstance(expected, torch.Tensor):
        assert torch.equal(actual, expected), path
    elif isinstance(expected, dict):
        assert actual.keys() == expected.keys(), path
        for key in expected:
            assert_same(actual[key], expected[key], f"{path}[{key!r}]", tolerance=tolerance)
    elif isinstance(expected, (list, tuple)):
        assert len(actual) == len(expected), path
        for index, item in enumerate(expected):
            assert_same(actual[index], item, f"{path}[{index}]", tolerance=tolerance)
    elif not callable(expected):
        assert actual == expected, path
