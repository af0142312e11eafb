"""A training run with every kind of randomness."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset, default_collate

from pytorch_accelerated import Trainer
from tests.support.resuming import digests

SAMPLES = 21


class Augmented(Dataset[Any]):
    """Float64 samples with noise from each of the generators that augmentations use."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        noise = torch.rand(3, dtype=torch.float64) + torch.from_numpy(np.random.rand(3)) + random.random()
        return index / SAMPLES + noise, torch.tensor([index % 3, index % 2], dtype=torch.float64)


def mix(samples: list[Any]) -> Any:
    """A collate function that mixes each sample with another one of the batch."""
    inputs, targets = default_collate(samples)
    share = np.random.beta(0.4, 0.4) * random.random()
    partner = torch.randperm(len(inputs))
    return share * inputs + (1 - share) * inputs[partner], share * targets + (1 - share) * targets[partner]


def dropout_model(*, rate: float = 0.3) -> nn.Module:
    """A model with the same float64 weights on every call; the global generators are left alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(11)
        return nn.Sequential(nn.Linear(3, 8), nn.Dropout(rate), nn.Tanh(), nn.Linear(8, 2)).double()


def train_randomly(
    seed: int | None,
    *,
    workers: int = 0,
    epochs: int = 2,
    batch_size: int = 4,
    evaluates: bool = True,
    change: Callable[[Trainer], None] | None = None,
) -> Trainer:
    """A finished run with augmentations, a random collate function, dropout and accumulation."""
    model = dropout_model()
    trainer = Trainer(model, nn.MSELoss(), torch.optim.SGD(model.parameters(), lr=0.1), callbacks=(), seed=seed)
    if change is not None:
        change(trainer)
    trainer.train(
        Augmented(),
        epochs,
        Augmented() if evaluates else None,
        batch_size,
        gradient_accumulation_steps=2,
        train_dataloader_kwargs={"num_workers": workers},
        eval_dataloader_kwargs={"num_workers": workers},
        collate_fn=mix,
    )
    return trainer


def digest(trainer: Trainer) -> str:
    """An exact digest of a run's results: weights and every metric."""
    history = trainer.run_history
    metrics = {name: list(history.get_metric_values(name)) for name in history.get_metric_names()}
    return str(digests({"model": trainer.get_model().state_dict(), "metrics": metrics}))
