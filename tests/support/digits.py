"""A network in float64 on scikit-learn's digits."""

from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import nn

from pytorch_accelerated import Trainer


def digits() -> tuple[torch.Tensor, torch.Tensor]:
    """640 rows, and their labels."""
    data = load_digits()
    return torch.tensor(data.data[:640] / 16), torch.tensor(data.target[:640])


def digits_trainer(*callbacks: Any, loss_func: Any = None) -> Trainer:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 16), nn.Tanh(), nn.Linear(16, 10)).double()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    return Trainer(model, loss_func or nn.CrossEntropyLoss(), optimizer, callbacks=callbacks, seed=3)
