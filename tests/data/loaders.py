"""Helpers for tests of loaders: datasets that record their use, and ranks without processes."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import Dataset, IterableDataset

from pytorch_accelerated.data.building import distribute_loader
from pytorch_accelerated.data.updates import MicroBatch, RunLoader
from pytorch_accelerated.facts.accumulation import Accumulation


class OneOf:
    """A rank as the plan of an epoch sees it. It can't talk to others, and for planned data it needn't."""

    device = torch.device("cpu")

    def __init__(self, index: int = 0, count: int = 1) -> None:
        self.index = index
        self.count = count
        self.is_first = index == 0

    def exchange(self, value: Any) -> list[Any]:
        return [value]

    def from_first(self, value: Any) -> Any:
        return value

    exchange_numbers = exchange

    def sum(self, numbers: list[float]) -> list[float]:
        return numbers

    def do_on_first(self, function: Callable[[], Any]) -> Any:
        return function()


class Numbers(Dataset[Any]):
    """Samples that are their own index; remembers which it was asked for, in this process."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.asked: list[Any] = []

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: Any) -> torch.Tensor:
        self.asked.append(index)
        return torch.tensor(index)


class Stream(IterableDataset[Any]):
    """The numbers from 0 on, as a stream; `rows` of them at a time if that is given."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.epochs: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (torch.tensor(number) for number in range(self.size))


class SizedStream(Stream):
    def __len__(self) -> int:
        return self.size


def adapted(loader: Any, *, rank: int = 0, ranks: int = 1, steps: int = 1, seed: int = 0, **kwargs: Any) -> RunLoader:
    one_of: Any = OneOf(rank, ranks)
    return distribute_loader(loader, one_of, seed=seed, accumulation=Accumulation(steps), **kwargs)


def numbers_in(batches: Any) -> list[list[int]]:
    return [batch.tolist() for batch in batches]


def trained_on(loader: RunLoader, **kwargs: Any) -> list[list[int]]:
    """The batches of a training pass that count."""
    return numbers_in(micro.batch for micro in loader.batches(**kwargs) if not micro.is_borrowed)


def updates_of(loader: RunLoader, **kwargs: Any) -> list[list[MicroBatch]]:
    """The batches of each update of a training pass."""
    updates: list[list[MicroBatch]] = []
    for micro in loader.batches(**kwargs):
        if not updates or updates[-1][-1].is_last:
            updates.append([])
        updates[-1].append(micro)
    return updates


def evaluated_on(loader: RunLoader) -> list[list[int]]:
    return numbers_in(round_.batch for round_ in loader.rounds() if round_.batch is not None)
