"""Optimizers to schedule, and the learning rates that their updates really used."""

import torch
from torch.optim import SGD, Optimizer

from pytorch_accelerated.schedulers.scheduler_base import StatefulSchedulerBase


def an_optimizer(*rates: float) -> SGD:
    """SGD with one weight and one parameter group per learning rate."""
    return SGD([{"params": [a_weight()], "lr": rate} for rate in rates or (0.1,)])


def a_weight() -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))


def train(optimizer: Optimizer, scheduler: StatefulSchedulerBase, num_updates: int) -> list[list[float]]:
    """Train, and return the rates that each update used, one per group, as seen in the weights.

    The gradient of each weight is 1, so plain SGD moves it from 0 by exactly the learning rate.
    """
    used = []
    for _ in range(num_updates):
        weights = [group["params"][0] for group in optimizer.param_groups]
        for weight in weights:
            weight.data.zero_()
        torch.cat(weights).sum().backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        used.append([-weight.item() for weight in weights])
    return used


def rates(optimizer: Optimizer, scheduler: StatefulSchedulerBase, num_updates: int) -> list[float]:
    """The rates that each update of an optimizer with one group used."""
    return [rate for (rate,) in train(optimizer, scheduler, num_updates)]
