"""Loaders and samplers of a Hugging Face trainer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader, Sampler

from pytorch_accelerated.errors import ConfigurationError, DataError

if TYPE_CHECKING:
    pass

# Rows are sorted by length within so many batches: few enough that epochs differ, enough for rows of similar length.
_BATCHES_PER_POOL = 50


class LoadersBySet:
    """Keeps loaders with their datasets, so that each dataset has one pool of workers.

    Datasets are compared by identity and kept alive, because an address or a name may belong to another dataset later.
    Beyond `limit` datasets, the least recently used one is dropped.
    """

    def __init__(self, limit: int = 8) -> None:
        self._limit = limit
        self._pairs: list[tuple[Any, DataLoader[Any]]] = []

    def get(self, dataset: Any, make: Callable[[Any], DataLoader[Any]]) -> DataLoader[Any]:
        """The loader of `dataset`, made by `make` on first use."""
        pair = next((pair for pair in self._pairs if pair[0] is dataset), None) or (dataset, make(dataset))
        self._pairs = [*(other for other in self._pairs if other is not pair), pair][-self._limit :]
        return pair[1]


class LengthGroupedSampler(Sampler[int]):
    """Yields rows in random order, but with rows of similar length in each batch.

    The first batch has the longest row, so that running out of memory happens at once.
    """

    def __init__(self, lengths: Sequence[int], batch_size: int) -> None:
        self._lengths = torch.as_tensor(lengths)
        self._batch_size = batch_size

    def __len__(self) -> int:
        return len(self._lengths)

    def __iter__(self) -> Iterator[int]:
        order = torch.randperm(len(self))
        pools = [
            pool[self._lengths[pool].argsort(descending=True, stable=True)]
            for pool in torch.split(order, _BATCHES_PER_POOL * self._batch_size)
        ]
        longest = max(range(len(pools)), key=lambda index: int(self._lengths[pools[index][0]]), default=0)
        pools[:1], pools[longest : longest + 1] = pools[longest : longest + 1], pools[:1]
        return iter(torch.cat(pools).tolist() if pools else [])


def row_lengths(dataset: Any, length_column: str, input_name: str) -> list[int]:
    """The length of each row: its column `length_column`, or else the length of its inputs."""
    columns = getattr(dataset, "column_names", None)
    if isinstance(columns, list) and length_column in columns:
        return list(dataset[length_column])
    first = dataset[0] if len(dataset) else {}
    if not isinstance(first, Mapping) or not (length_column in first or input_name in first):
        has = ", ".join(map(repr, first)) if isinstance(first, Mapping) else f"a {type(first).__name__}"
        raise ConfigurationError(
            f"Rows should be grouped by length, but a row has {has}: neither {length_column!r}, which would tell its "
            f"length, nor {input_name!r}, which has one. Add such a column, name it with `length_column_name`, or "
            "choose another `train_sampling_strategy`."
        )
    if length_column in first:
        return [int(row[length_column]) for row in dataset]
    return [len(row[input_name]) for row in dataset]


class PaddingCollator:
    """Pads rows with the method `pad` of a tokenizer."""

    def __init__(self, processing_class: Any) -> None:
        self._pad = processing_class.pad

    def __call__(self, features: list[Any]) -> Any:
        batch = self._pad(features, return_tensors="pt")
        for name in ("label", "label_ids"):
            if name in batch:
                batch["labels"] = batch.pop(name)
        return batch


def refuse_missing(dataset: Any, purpose: str, argument: str) -> None:
    """Reject a missing dataset, or one without rows."""
    if dataset is None:
        raise ConfigurationError(f"There is no dataset to {purpose}. Pass `{argument}`.")
    if isinstance(dataset, Mapping):
        raise DataError(
            f"`{argument}` is a dict of {', '.join(map(repr, dataset)) or 'nothing'}, which has no rows to {purpose}. "
            "Pass one of its datasets; of columns make a `datasets.Dataset.from_dict`, or a list with a dict for each "
            "row."
        )
    if hasattr(dataset, "__len__") and not len(dataset):
        raise DataError(f"`{argument}` is empty, so there is nothing to {purpose}. Check how it was made.")
