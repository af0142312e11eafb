"""The work that every way of training does: the same network, optimizer, data, and number of steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from benchmarks.data import CLASSES, KINDS, VOCABULARY, Batch, ReadyBatches, Size, pad, samples, texts


class Parts(NamedTuple):
    """What a user would provide."""

    model: nn.Module
    loss_func: nn.Module
    optimizer: torch.optim.Optimizer


@dataclass(frozen=True)
class Feed:
    """Data, and how it should be loaded.

    Attributes:
        data: `ReadyBatches` or a dataset.
        batch_size: samples per batch.
        steps: batches of all passes.
        epochs: passes over the data.
        workers: processes that load; None if the user says nothing about them.
        collate_fn: the user's function that makes a batch of rows, if there is one.
    """

    data: Any
    batch_size: int
    steps: int
    epochs: int = 1
    workers: int | None = None
    collate_fn: Callable[..., Any] | None = None

    @property
    def is_stream(self) -> bool:
        """Whether the data has an order of its own and no length."""
        return isinstance(self.data, IterableDataset)

    @property
    def is_of_columns(self) -> bool:
        """Whether its batches are dicts of columns."""
        return self.collate_fn is None and hasattr(self.data, "column_names")

    def loader(self, *, shuffle: bool) -> Iterable[Any]:
        """The loader that one would write by hand; ready batches need none."""
        if isinstance(self.data, ReadyBatches):
            return self.data
        workers = self.workers or 0
        return DataLoader(
            self.data,
            self.batch_size,
            shuffle=shuffle and not self.is_stream,
            num_workers=workers,
            persistent_workers=workers > 0,
            collate_fn=self.collate_fn,
        )


@dataclass(frozen=True)
class Job:
    """Some epochs of training, or one evaluation. Small enough to be sent to another process.

    Attributes:
        samples: the number of samples.
        batch_size: samples per batch.
        features: features per sample.
        hidden: widths of the network's hidden layers.
        kind: the kind of data; a name in `KINDS`.
        epochs: passes over the data.
        workers: processes that load; None if the user says nothing about them.
        is_evaluation: whether to compute the mean loss instead of training.
        step_seconds: additional time of a forward pass.
        row_seconds: additional time to fetch a sample.
    """

    samples: int
    batch_size: int = 32
    features: int = 32
    hidden: tuple[int, ...] = (64,)
    kind: str = "ready batches"
    epochs: int = 1
    workers: int | None = None
    is_evaluation: bool = False
    step_seconds: float = 0.0
    row_seconds: float = 0.0

    @property
    def steps(self) -> int:
        """Batches of an epoch."""
        return -(-self.samples // self.batch_size)

    def parts(self) -> Parts:
        """The parts, always with the same initial weights."""
        torch.manual_seed(0)
        model = nn.Sequential(TokenMean(self.features)) if self.kind == "texts" else nn.Sequential()
        widths = (self.features, *self.hidden)
        for width, next_width in zip(widths, widths[1:], strict=False):
            model.extend([nn.Linear(width, next_width), nn.ReLU()])
        model.append(nn.Linear(widths[-1], CLASSES))
        if self.step_seconds:
            model.append(BusyWait(self.step_seconds))
        return Parts(model, nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9))

    def data(self) -> Any:
        """`ReadyBatches` or a dataset."""
        return KINDS[self.kind].make(Size(self.samples, self.features, self.batch_size, self.row_seconds))

    def feed(self) -> Feed:
        """The data, and how it should be loaded."""
        return Feed(
            self.data(),
            self.batch_size,
            self.steps * self.epochs,
            self.epochs,
            self.workers,
            KINDS[self.kind].collate_fn,
        )

    def loss_of(self, model: nn.Module) -> float:
        """The loss on the first samples, which shows whether a model has been through this job."""
        layers = [layer for layer in model.eval().children() if not isinstance(layer, BusyWait)]
        inputs, targets = self._first_samples(1000)
        with torch.no_grad():
            return nn.functional.cross_entropy(nn.Sequential(*layers)(inputs), targets).item()

    def _first_samples(self, size: int) -> Batch:
        if self.kind == "texts":
            tokens, labels = texts(self.samples)
            return pad(list(zip(tokens[:size], labels[:size], strict=True)))
        inputs, targets = samples(self.samples, self.features)
        return inputs[:size], targets[:size]


def ordinary_job(samples: int, *, workers: int | None) -> Job:
    """An epoch over a dataset that has `__getitem__` and no more."""
    return Job(samples=samples, features=64, hidden=(128, 64), kind="rows", workers=workers)


class TokenMean(nn.Module):
    """The mean of the vectors of a text's tokens. Token 0 is padding."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.vectors = nn.Embedding(VOCABULARY, features, padding_idx=0)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.vectors(tokens).sum(dim=1) / (tokens != 0).sum(dim=1, keepdim=True)


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


def inputs_and_targets(batch: Any) -> Batch:
    """Both parts of a batch, which is a pair or a dict of columns."""
    return (batch["inputs"], batch["targets"]) if isinstance(batch, dict) else batch
