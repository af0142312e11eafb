"""Batches of rows of similar length: the strategies "group_by_length" and "batch_rebalance"."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import Sampler

from pytorch_accelerated.errors import ConfigurationError


class LengthGroupedSampler(Sampler[int]):
    """Yields rows in random order, but sorted by length within pools, so that batches have rows of similar length.

    The first batch has the longest row, so that running out of memory happens at once.
    """

    def __init__(self, lengths: Sequence[int], pool_size: int) -> None:
        self._lengths = torch.as_tensor(lengths)
        self._pool_size = pool_size

    def __len__(self) -> int:
        return len(self._lengths)

    def __iter__(self) -> Iterator[int]:
        order = torch.randperm(len(self))
        if len(self):
            longest = int(self._lengths[order].argmax())
            order[[0, longest]] = order[[longest, 0]]
        pools = torch.split(order, self._pool_size)
        return iter(
            torch.cat([pool[self._lengths[pool].argsort(descending=True, stable=True)] for pool in pools]).tolist()
        )


def row_lengths(dataset: Any, length_column: str, input_name: str) -> list[int]:
    """The length of each row: its column `length_column`, or else the length of its inputs."""
    columns = getattr(dataset, "column_names", None)
    if isinstance(columns, list) and length_column in columns:
        return list(dataset[length_column])
    first = dataset[0] if len(dataset) else {}
    if length_column not in first and input_name not in first:
        raise ConfigurationError(
            f"Rows should be grouped by length, but a row has neither {length_column!r} nor {input_name!r}: name the "
            "column with `length_column_name`, or choose another `train_sampling_strategy`."
        )
    if length_column in first:
        return [int(row[length_column]) for row in dataset]
    return [len(row[input_name]) for row in dataset]
