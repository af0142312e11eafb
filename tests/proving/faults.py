"""Runs with a planted fault each, as scripts of users have them."""

import itertools
import random
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset, Sampler

from pytorch_accelerated import Trainer
from pytorch_accelerated.callbacks import TrainerCallback
from tests.support.reference import regression_data, tiny_model

INPUTS, TARGETS = regression_data(18)
Run = tuple[Trainer, dict[str, Any]]


class Own(Trainer):
    """A trainer of the user's own, of which other processes cannot make a copy without a factory."""


def run(dataset: Any = None, *callbacks: Any, base: type[Trainer] = Own, **parts: Any) -> Run:
    """A run of six updates in two epochs, with `parts` of the trainer or arguments of `train`."""
    model = parts.pop("model", None) or tiny_model()
    optimizer = parts.pop("optimizer", None) or torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    trainer = base(model, parts.pop("loss_func", nn.MSELoss()), optimizer, callbacks=callbacks, seed=3)
    data = (INPUTS, TARGETS) if dataset is None else dataset
    return trainer, {"train_dataset": data, "updates": 6, "per_device_batch_size": 6, **parts}


class Rows(Dataset[Any]):
    def __len__(self) -> int:
        return len(INPUTS)

    def __getitem__(self, index: int) -> Any:
        return self.changed(INPUTS[index]), TARGETS[index]

    def changed(self, row: torch.Tensor) -> torch.Tensor:
        return row


class TorchNoise(Rows):
    def __init__(self) -> None:
        self.noise = torch.Generator().manual_seed(0)

    def changed(self, row: torch.Tensor) -> torch.Tensor:
        return row + torch.rand((), generator=self.noise)


class NumpyNoise(Rows):
    def __init__(self) -> None:
        self.rng = np.random.default_rng(0)

    def changed(self, row: torch.Tensor) -> torch.Tensor:
        return row + float(self.rng.normal())


class Jitter:
    def __init__(self) -> None:
        self.source = random.Random(0)

    def __call__(self, row: torch.Tensor) -> torch.Tensor:
        return row + self.source.random()


class Transformed(Rows):
    def __init__(self) -> None:
        self.transforms = [Jitter()]

    def changed(self, row: torch.Tensor) -> torch.Tensor:
        return self.transforms[0](row)


class Fading(Rows):
    def __init__(self) -> None:
        self.served = 0

    def changed(self, row: torch.Tensor) -> torch.Tensor:
        self.served += 1
        return row * (1 + self.served / 100)


class ByTheClock(Rows):
    def changed(self, row: torch.Tensor) -> torch.Tensor:
        return row + time.perf_counter_ns() % 1000 / 1000


_drawn = 0


class Global(Rows):
    def changed(self, row: torch.Tensor) -> torch.Tensor:
        global _drawn
        _drawn += 1
        return row * (1 + _drawn / 100)


class BySet(Sampler[int]):
    def __init__(self) -> None:
        self.groups = {f"group {index}" for index in range(len(INPUTS))}

    def __len__(self) -> int:
        return len(self.groups)

    def __iter__(self) -> Iterator[int]:
        return iter([int(group.split()[1]) for group in self.groups])


class EveryFourth(TrainerCallback):
    def __init__(self) -> None:
        self.count = 0

    def on_optimizer_step_end(self, trainer: Trainer, **kwargs: Any) -> None:
        self.count += 1
        if self.count % 4 == 0:
            trainer.optimizer.param_groups[0]["lr"] /= 2


class RandomRates(TrainerCallback):
    def __init__(self) -> None:
        self.rng = np.random.RandomState(0)

    def on_train_step_start(self, trainer: Trainer, **kwargs: Any) -> None:
        trainer.optimizer.param_groups[0]["lr"] = float(self.rng.uniform(0.01, 0.1))


class Curriculum(Own):
    level = 1.0

    def calculate_train_batch_loss(self, batch: Any) -> dict[str, Any]:
        self.level *= 0.9
        output = super().calculate_train_batch_loss(batch)
        return {**output, "loss": output["loss"] * self.level}


class Warming(torch.optim.SGD):
    calls = 0

    def step(self, closure: Any = None) -> Any:
        self.calls += 1
        for group in self.param_groups:
            group["lr"] = min(0.1, 0.02 * self.calls)
        return super().step(closure)


class Forgetful(torch.optim.SGD):
    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "state": {}}


class RunningLoss:
    def __init__(self) -> None:
        self.mean = 1.0

    def __call__(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss = nn.functional.mse_loss(outputs, targets)
        self.mean = 0.9 * self.mean + 0.1 * loss.item()
        return loss / self.mean


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = tiny_model()
        self.calls = 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.inner(inputs) * (1 + self.calls / 10)


class OwnNoise(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = tiny_model()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.inner(inputs) * (1 + time.perf_counter_ns() % 1000 / 1000)


def counted_rate(optimizer: Any) -> Any:
    steps = itertools.count()
    calls = 0

    def rate(epoch: int) -> float:
        nonlocal calls
        calls = next(steps)
        return 1 / (1 + calls)

    return torch.optim.lr_scheduler.LambdaLR(optimizer, rate)


def normalised() -> Run:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2)).double()
    return run(model=model)


def of_batch(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """A loss that is not a mean over the rows."""
    return (outputs - targets).square().mean().sqrt()


def warming() -> Run:
    model = tiny_model()
    return run(model=model, optimizer=Warming(model.parameters(), 0.1))


def forgetful() -> Run:
    model = tiny_model()
    return run(model=model, optimizer=Forgetful(model.parameters(), 0.1, momentum=0.9))


def by_set() -> Run:
    return run(base=Trainer, train_dataloader_kwargs={"sampler": BySet()}, per_device_batch_size=3)


def _anew(made: Run) -> Run:
    """For other processes: the arguments of `train` alone."""
    trainer, arguments = made
    return trainer, {name: value for name, value in arguments.items() if name != "updates"}


def by_set_anew() -> Run:
    return _anew(by_set())


def healthy() -> Run:
    return _anew(run(Rows()))
