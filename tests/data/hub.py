"""Streams of the package `datasets` for tests of resuming, put together in all ways that matter to it."""

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from datasets import IterableDataset, interleave_datasets
from datasets.distributed import split_dataset_by_node

from tests.support.reference import regression_data

Row = dict[str, Any]


def make_rows(shards: list[int]) -> Iterator[Row]:
    inputs, targets = regression_data(10)
    for shard in shards:
        for index in range(shard, 10, 2):
            yield {"inputs": inputs[index].tolist(), "targets": targets[index].tolist()}


def plain() -> Any:
    """Ten rows in two shards, one for each of two workers."""
    return IterableDataset.from_generator(make_rows, gen_kwargs={"shards": [0, 1]})


def with_noise(row: Row) -> Row:
    noise = torch.rand(1).item() + np.random.rand() + random.random()
    return {**row, "inputs": [value + 0.1 * noise for value in row["inputs"]]}


def with_noise_in_batches(rows: Row) -> Row:
    inputs = [with_noise({"inputs": values})["inputs"] for values in rows["inputs"]]
    return {**rows, "inputs": inputs}


# Those that say exactly where they are.
EXACT: dict[str, Callable[[], Any]] = {
    "rows": plain,
    "rows with noise": lambda: plain().map(with_noise),
    "the share of a rank": lambda: split_dataset_by_node(plain(), 1, 2),
    "some rows, as tensors": lambda: (
        plain().filter(lambda row: row["targets"][0] > 0).map(with_noise).skip(1).take(4).with_format("torch")
    ),
}
# Those that do not, each for another reason. Below what mixes several sources there is no noise: `datasets` reads them
# in threads, so that no two passes would be the same.
INEXACT: dict[str, Callable[[], Any]] = {
    "a shuffle buffer": lambda: plain().shuffle(seed=0, buffer_size=4),
    "a shuffle buffer with noise": lambda: plain().shuffle(seed=0, buffer_size=4).map(with_noise),
    "noise in batches": lambda: plain().map(with_noise_in_batches, batched=True, batch_size=3),
    "two streams in turns": lambda: interleave_datasets([plain(), plain()]),
    "rows again": lambda: plain().map(with_noise).take(4).repeat(2),
}
HUB_STREAMS = {**EXACT, **INEXACT}


def as_pairs(rows: list[Row]) -> tuple[torch.Tensor, ...]:
    """A batch of inputs and targets, as `nn.MSELoss` needs them."""
    return tuple(
        torch.stack([torch.as_tensor(row[name], dtype=torch.float64) for row in rows]) for name in ("inputs", "targets")
    )
