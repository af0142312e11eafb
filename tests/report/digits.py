"""Small runs on scikit-learn's digits that write a page."""

import json
from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

from pytorch_accelerated import Trainer
from pytorch_accelerated.callbacks import TrainerCallback
from pytorch_accelerated.extras.report.contents import data_in


def digits(rows: slice) -> TensorDataset:
    """Images of 1x8x8 from 0 to 1, and their labels."""
    data = load_digits()
    return TensorDataset(torch.tensor(data.images[rows, None] / 16).float(), torch.tensor(data.target[rows]))


TRAIN = digits(slice(0, 300))
EVAL = digits(slice(300, 437))  # an odd number


def trainer_with(*callbacks: Any, trainer_class: type[Trainer] = Trainer) -> Trainer:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    return trainer_class(model, nn.CrossEntropyLoss(), optimizer, callbacks=callbacks, seed=1)


class At(TrainerCallback):
    """Does something after so many updates."""

    def __init__(self, update: int, action: Any) -> None:
        self.update = update
        self.action = action

    def on_optimizer_step_end(self, trainer: Trainer, **kwargs: Any) -> None:
        if trainer.run_state.updates == self.update:
            if isinstance(self.action, BaseException):
                raise self.action
            self.action()


class Broken(Trainer):
    """Has a loss that is not finite in the updates with these numbers."""

    numbers = (3, 4)

    def calculate_train_batch_loss(self, batch: Any) -> dict[str, Any]:
        output = super().calculate_train_batch_loss(batch)
        if self.run_state.updates in self.numbers:
            output["loss"] = output["loss"] * torch.nan
        return output


def train(trainer: Trainer, num_epochs: int = 2, **kwargs: Any) -> Trainer:
    """10 updates an epoch."""
    trainer.train(TRAIN, num_epochs, EVAL, **{"per_device_batch_size": 30, **kwargs})
    return trainer


def run_on_page(path: Path) -> dict[str, Any]:
    """What the page shows."""
    data = data_in(path.read_text())
    assert data is not None
    (run,) = json.loads(data)["runs"]
    assert isinstance(run, dict)
    return run


def outputs_of(trainer: Trainer) -> torch.Tensor:
    """The model's outputs for `EVAL`, computed without the trainer."""
    model = trainer.get_model().eval()
    with torch.no_grad():
        return model(EVAL.tensors[0])
