"""The kinds of data that the benchmarks train on, from ready batches to streams."""

from __future__ import annotations

import functools
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset, IterableDataset, TensorDataset, get_worker_info

CLASSES = 10
VOCABULARY = 1000
Batch = tuple[torch.Tensor, torch.Tensor]
Row = tuple[Any, torch.Tensor]


@functools.lru_cache(maxsize=4)
def samples(size: int, features: int) -> Batch:
    """Inputs, and labels that can be learned from them."""
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(size, features, generator=generator)
    return inputs, inputs[:, :CLASSES].argmax(dim=1)


@functools.lru_cache(maxsize=4)
def texts(size: int) -> tuple[list[list[int]], torch.Tensor]:
    """Texts of 5 to 50 tokens, and labels that can be learned from them. Token 0 is padding."""
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(5, 51, (size,), generator=generator).tolist()
    labels = torch.randint(CLASSES, (size,), generator=generator)
    tokens = [torch.randint(1, VOCABULARY, (length,), generator=generator) for length in lengths]
    for text, label in zip(tokens, labels, strict=True):
        text[::2] = 1 + label  # every other token is a hint
    return [text.tolist() for text in tokens], labels


class ReadyBatches:
    """Batches that cost nothing to load."""

    def __init__(self, inputs: torch.Tensor, targets: torch.Tensor, batch_size: int) -> None:
        self.batch_size = batch_size
        self._batches = list(zip(inputs.split(batch_size), targets.split(batch_size), strict=True))

    def __iter__(self) -> Iterator[Batch]:
        return iter(self._batches)

    def __len__(self) -> int:
        return len(self._batches)


class Rows(Dataset[Row]):
    """The dataset that most people write. A row costs `row_seconds` of processor time more than its indexing."""

    def __init__(self, inputs: Sequence[Any] | torch.Tensor, targets: torch.Tensor, row_seconds: float = 0.0) -> None:
        self._inputs = inputs
        self._targets = targets
        self._row_seconds = row_seconds

    def __getitem__(self, index: int) -> Row:
        if self._row_seconds:
            self._spend(self._row_seconds)
        return self._inputs[index], self._targets[index]

    def __len__(self) -> int:
        return len(self._targets)

    def _spend(self, seconds: float) -> None:
        """Count the thread's own time: a row costs the same in every process and on a busy machine."""
        end = time.thread_time() + seconds
        while time.thread_time() < end:
            pass


class WaitingRows(Rows):
    """Rows that come from a slow disk: they take time, but no processor."""

    def _spend(self, seconds: float) -> None:
        time.sleep(seconds)


class RandomRows(Rows):
    """Rows with augmentation that draws from all three global generators."""

    def __getitem__(self, index: int) -> Row:
        inputs, target = super().__getitem__(index)
        inputs = inputs * random.uniform(0.9, 1.1) + float(np.random.normal(0, 0.01))
        return inputs + 0.01 * torch.randn(len(inputs)), target


class RowStream(IterableDataset[Row]):
    """Rows in a fixed order, distributed over the worker processes as torch's documentation says."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows

    def __iter__(self) -> Iterator[Row]:
        worker = get_worker_info()
        first, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        return (self._rows[index] for index in range(first, len(self._rows), step))


@functools.lru_cache(maxsize=4)
def arrow_dataset(size: int, features: int) -> Any:
    """The samples as a `datasets.Dataset`, whose rows are dicts of lists and numbers."""
    import datasets

    inputs, targets = samples(size, features)
    return datasets.Dataset.from_dict({"inputs": inputs.tolist(), "targets": targets.tolist()})


def stack(rows: Sequence[Row]) -> Batch:
    """What a collate function does for rows of tensors."""
    inputs, targets = zip(*rows, strict=True)
    return torch.stack(inputs), torch.stack(targets)


def pad(rows: Sequence[Row]) -> Batch:
    """What a collate function does for texts of different lengths."""
    inputs, targets = zip(*rows, strict=True)
    return pad_sequence([torch.tensor(text) for text in inputs], batch_first=True), torch.stack(targets)


def collate_dicts(rows: Sequence[Mapping[str, Any]]) -> Batch:
    """What a collate function does for dicts of lists and numbers."""
    return torch.tensor([row["inputs"] for row in rows]), torch.tensor([row["targets"] for row in rows])


class Size(NamedTuple):
    """The size of a dataset.

    Attributes:
        samples: the number of samples.
        features: features per sample; texts have tokens instead.
        batch_size: samples per batch, for batches created beforehand.
        row_seconds: additional time to fetch a sample.
    """

    samples: int
    features: int
    batch_size: int
    row_seconds: float


class Kind(NamedTuple):
    """A kind of data.

    Attributes:
        make: creates it.
        collate_fn: the user's function that makes a batch of rows, if there is one.
    """

    make: Callable[[Size], Any]
    collate_fn: Callable[[Sequence[Any]], Batch] | None = None


KINDS = {
    "ready batches": Kind(lambda size: ReadyBatches(*samples(size.samples, size.features), size.batch_size)),
    "tensors": Kind(lambda size: TensorDataset(*samples(size.samples, size.features))),
    "rows": Kind(lambda size: Rows(*samples(size.samples, size.features), size.row_seconds)),
    "rows to stack": Kind(lambda size: Rows(*samples(size.samples, size.features), size.row_seconds), stack),
    "waiting rows": Kind(lambda size: WaitingRows(*samples(size.samples, size.features), size.row_seconds)),
    "random rows": Kind(lambda size: RandomRows(*samples(size.samples, size.features), size.row_seconds)),
    "texts": Kind(lambda size: Rows(*texts(size.samples), size.row_seconds), pad),
    "stream": Kind(lambda size: RowStream(Rows(*samples(size.samples, size.features), size.row_seconds))),
    "arrow": Kind(lambda size: arrow_dataset(size.samples, size.features), collate_dicts),
    "arrow of tensors": Kind(lambda size: arrow_dataset(size.samples, size.features).with_format("torch")),
}
