"""Small runs of the real trainer for the tests of callbacks that save."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from pytorch_accelerated import Trainer
from pytorch_accelerated.errors import StopTrainingError
from pytorch_accelerated.loop.callback import TrainerCallback
from pytorch_accelerated.tracking import RunHistory
from tests.support.reference import regression_data

DATA = regression_data(20)
BATCH_SIZE = 4  # so an epoch has five updates


def noisy_model(seed: int = 0) -> nn.Module:
    """A float64 network with batch statistics and dropout: its runs are the same only if everything is restored."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.2), nn.Linear(4, 2))
    return model.double()


def a_trainer(*callbacks: Any, model: nn.Module | None = None, lr: float = 0.01) -> Trainer:
    model = model or noisy_model()
    return Trainer(model, nn.MSELoss(), torch.optim.Adam(model.parameters(), lr=lr), callbacks=callbacks, seed=5)


def fit(trainer: Trainer, num_epochs: int | None = 3, **kwargs: Any) -> RunHistory:
    return trainer.train(DATA, num_epochs, **{"eval_dataset": DATA, "per_device_batch_size": BATCH_SIZE, **kwargs})


def values_of(history: RunHistory) -> dict[str, list[float]]:
    return {name: list(history.get_metric_values(name)) for name in history.get_metric_names()}


def weights_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def assert_same_weights(actual: dict[str, Any], expected: dict[str, Any]) -> None:
    """To the bit."""
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


class Score(TrainerCallback):
    """Records given values as "score", one at the end of each epoch, and keeps the model's weights of each."""

    def __init__(self, values: Sequence[float]) -> None:
        self.values = values
        self.weights: list[dict[str, torch.Tensor]] = []

    def on_eval_epoch_end(self, trainer: Trainer, *, is_intermediate: bool = False, **kwargs: Any) -> None:
        if not is_intermediate and trainer._train_dataloader is not None:
            trainer.run_history.update_metric("score", self.values[trainer.run_state.epochs])
            self.weights.append(weights_of(trainer.get_model()))


class Record(TrainerCallback):
    """Keeps the model's weights before the first update of a run, and after each."""

    def __init__(self) -> None:
        self.weights: list[dict[str, torch.Tensor]] = []

    def on_training_run_start(self, trainer: Trainer, **kwargs: Any) -> None:
        self.weights = []

    def on_train_epoch_start(self, trainer: Trainer, **kwargs: Any) -> None:
        if not self.weights:
            self.weights.append(weights_of(trainer.get_model()))

    def on_optimizer_step_end(self, trainer: Trainer, **kwargs: Any) -> None:
        self.weights.append(weights_of(trainer.get_model()))


class StopAfter(TrainerCallback):
    """Asks for a stop after so many updates."""

    def __init__(self, updates: int) -> None:
        self.updates = updates

    def on_optimizer_step_end(self, trainer: Trainer, **kwargs: Any) -> None:
        if trainer.run_state.updates == self.updates:
            raise StopTrainingError("the test wants it")


class Die(Exception):
    """Ends a run as a crash would."""


class DieAfter(TrainerCallback):
    """Raises `Die` in the update that follows so many."""

    def __init__(self, updates: int) -> None:
        self.updates = updates

    def on_train_step_start(self, trainer: Trainer, **kwargs: Any) -> None:
        if trainer.run_state.updates == self.updates:
            raise Die


class SpoilAfter(TrainerCallback):
    """Makes a weight NaN, and so the loss, in the update that follows so many."""

    def __init__(self, updates: int) -> None:
        self.updates = updates

    def on_train_step_start(self, trainer: Trainer, **kwargs: Any) -> None:
        if trainer.run_state.updates == self.updates:
            next(trainer.get_model().parameters()).data.fill_(math.nan)
