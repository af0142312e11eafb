"""The work that every way of training does: the same network, optimizer, data, and number of steps."""

from __future__ import annotations

import functools
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

CLASSES = 10
Batch = tuple[torch.Tensor, torch.Tensor]


class Parts(NamedTuple):
    """What a user would provide."""

    model: nn.Module
    loss_func: nn.Module
    optimizer: torch.optim.Optimizer


@dataclass(frozen=True)
class Job:
    """One epoch of training, or one evaluation. Small enough to be sent to another process.

    Attributes:
        samples: the number of samples.
        batch_size: samples per batch.
        features: features per sample.
        hidden: width of the network's only hidden layer.
        is_ready: whether batches are created beforehand, so that loading costs nothing. Otherwise the data is a
            dataset.
        is_evaluation: whether to compute the mean loss instead of training.
        step_seconds: additional time of a forward pass.
        sample_seconds: additional time to fetch a sample.
    """

    samples: int
    batch_size: int = 32
    features: int = 32
    hidden: int = 64
    is_ready: bool = True
    is_evaluation: bool = False
    step_seconds: float = 0.0
    sample_seconds: float = 0.0

    @property
    def steps(self) -> int:
        """Batches of the epoch."""
        return -(-self.samples // self.batch_size)

    def parts(self) -> Parts:
        """The parts, always with the same initial weights."""
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(self.features, self.hidden), nn.ReLU(), nn.Linear(self.hidden, CLASSES))
        if self.step_seconds:
            model.append(BusyWait(self.step_seconds))
        return Parts(model, nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9))

    def data(self) -> Any:
        """`ReadyBatches` or a dataset."""
        inputs, targets = samples(self.samples, self.features)
        if self.is_ready:
            return ReadyBatches(inputs, targets, self.batch_size)
        dataset = TensorDataset(inputs, targets)
        return SlowDataset(dataset, self.sample_seconds) if self.sample_seconds else dataset

    def loss_of(self, model: nn.Module) -> float:
        """The loss on the first samples, which shows whether a model has been through this job."""
        inputs, targets = (tensor[:1000] for tensor in samples(self.samples, self.features))
        layers = [layer for layer in model.eval().children() if not isinstance(layer, BusyWait)]
        with torch.no_grad():
            return nn.functional.cross_entropy(nn.Sequential(*layers)(inputs), targets).item()


@functools.lru_cache(maxsize=4)
def samples(size: int, features: int) -> Batch:
    """Inputs, and labels that can be learned from them."""
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(size, features, generator=generator)
    return inputs, inputs[:, :CLASSES].argmax(dim=1)


class ReadyBatches:
    """Batches that cost nothing to load."""

    def __init__(self, inputs: torch.Tensor, targets: torch.Tensor, batch_size: int) -> None:
        self.batch_size = batch_size
        self._batches = list(zip(inputs.split(batch_size), targets.split(batch_size), strict=True))

    def __iter__(self) -> Iterator[Batch]:
        return iter(self._batches)

    def __len__(self) -> int:
        return len(self._batches)


class SlowDataset(Dataset[Batch]):
    """Samples that take time, as if they came from a disk."""

    def __init__(self, dataset: TensorDataset, sample_seconds: float) -> None:
        self._dataset = dataset
        self._sample_seconds = sample_seconds

    def __getitem__(self, index: int) -> Any:
        time.sleep(self._sample_seconds)
        return self._dataset[index]

    def __len__(self) -> int:
        return len(self._dataset)


class BusyWait(nn.Module):
    """Simulates a long computation: passes its input on after a fixed time."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self._seconds = seconds

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        end = time.perf_counter() + self._seconds
        while time.perf_counter() < end:
            pass
        return inputs


def as_loader(data: Any, batch_size: int, *, shuffle: bool, **kwargs: Any) -> Iterable[Batch]:
    """The loader that one would write by hand; ready batches need none."""
    if isinstance(data, ReadyBatches):
        return data
    return DataLoader(data, batch_size=batch_size, shuffle=shuffle, **kwargs)
