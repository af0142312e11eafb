"""Helpers for tests of loaders: datasets that record their use, and ranks without processes."""

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import Dataset, IterableDataset

from pytorch_accelerated.data.adapting import adapt_loader
from pytorch_accelerated.data.updates import RunLoader
from pytorch_accelerated.processes.ranks import Ranks


class OneOf(Ranks):
    """A rank as the plan of an epoch sees it. It can't talk to others, and for planned data it needn't."""

    def __init__(self, index: int = 0, count: int = 1) -> None:
        self.index = self.local_index = index
        self.count = count
        self.device = torch.device("cpu")
        self._is_alone = True


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
    return adapt_loader(loader, OneOf(rank, ranks), seed=seed, accumulation_steps=steps, feed=iter, **kwargs)


def numbers_in(batches: Any) -> list[list[int]]:
    return [batch.tolist() for batch in batches]


def trained_on(loader: RunLoader, **kwargs: Any) -> list[list[int]]:
    """The batches of a training pass that count."""
    return numbers_in(
        micro.batch for update in loader.updates(**kwargs) for micro in update.micro_batches if not micro.is_borrowed
    )


def evaluated_on(loader: RunLoader) -> list[list[int]]:
    return numbers_in(round_.batch for round_ in loader.rounds() if round_.batch is not None)
