"""Training with faults at chosen places, and a plain loop without them."""

import functools
import math
from collections.abc import Collection
from typing import Any

import torch
from torch import nn

from pytorch_accelerated import Trainer
from pytorch_accelerated.utils import ModelEma
from tests.support.reference import regression_data, windows_of_epoch

SEED = 3
SIZE, BATCH_SIZE, EPOCHS, DECAY = 24, 2, 2, 0.8
BATCHES = SIZE // BATCH_SIZE
DATA = regression_data(SIZE)
PLACES = ("nan in the loss", "inf in the loss", "one gradient", "an input")


class FaultyTrainer(Trainer):
    """A trainer whose batches with the numbers in `faults`, counted through the run from 0, fail at `place`.

    Attributes:
        seen: the first input of each computed batch.
    """

    faults: Collection[int] = ()
    place = PLACES[0]

    def training_run_start(self) -> None:
        self.seen: list[float] = []
        if self.run_state.updates == 0:
            torch.manual_seed(7)  # for dropout

    @property
    def is_faulty(self) -> bool:
        return self.run_state.epochs * BATCHES + self.run_state.batches_in_epoch in self.faults

    def calculate_train_batch_loss(self, batch: Any) -> dict[str, Any]:
        self.seen.append(batch[0][0, 0].item())
        if self.is_faulty and self.place == "an input":
            inputs = batch[0].clone()
            inputs[0, 1] = math.nan
            batch = (inputs, batch[1])
        output = super().calculate_train_batch_loss(batch)
        if self.is_faulty and self.place == "nan in the loss":
            output["loss"] = output["loss"] * math.nan
        if self.is_faulty and self.place == "inf in the loss":
            output["loss"] = output["loss"] + math.inf  # its gradients are finite
        return output

    def backward_step(self, loss: torch.Tensor) -> None:
        super().backward_step(loss)
        if self.is_faulty and self.place == "one gradient":
            self.get_model()[-1].weight.grad[0, 0] = math.nan


def noisy_model(*, dropout: float) -> nn.Module:
    """A model with every kind of layer in which a batch leaves traces."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layers = (nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(dropout), nn.Tanh(), nn.Linear(4, 2))
        return nn.Sequential(*layers).double()


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


schedule = functools.partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.95)


def train_without(
    updates: Collection[int], *, accumulation: int, dropout: float, stop_before: int = 99
) -> dict[str, Any]:
    """The result of a plain loop that leaves out `updates`, counted from 0."""
    model = noisy_model(dropout=dropout)
    optimizer = momentum(model)
    scheduler = schedule(optimizer)
    average = ModelEma(model, decay=DECAY)
    losses: list[list[float]] = []
    torch.manual_seed(7)
    number = 0
    for epoch in range(EPOCHS):
        losses.append([])
        for window in windows_of_epoch(SIZE, BATCH_SIZE * accumulation, seed=SEED, epoch=epoch):
            number += 1
            if number - 1 in updates or number > stop_before:
                continue
            for rows in window.split(BATCH_SIZE):
                loss = nn.functional.mse_loss(model(DATA[0][rows]), DATA[1][rows])
                losses[-1].append(loss.item())
                (loss if accumulation == 1 else loss * (len(rows) / len(window))).backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            average.update(model)
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scheduler": scheduler.state_dict(),
        "average": average.module.state_dict(),
        "losses": losses,
    }
