"""Fetches and collates the rows of a map-style dataset, under the key of their batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils.data import Dataset, default_collate

from pytorch_accelerated.compat.python import add_note
from pytorch_accelerated.compat.torch import pinned
from pytorch_accelerated.seeding import host_generators_seeded, seed_host_generators


class Request(NamedTuple):
    """One batch to fetch.

    `key` seeds torch, numpy and random while the batch is fetched and collated. It depends on the batch only, not on
    the worker or on earlier batches, so augmentations are the same with any number of workers and after a resume.
    """

    indices: Sequence[Any]
    key: int


class RowBatches(Dataset[Any]):
    """The batches of `dataset` by `Request`: those of workers as items, those of this process by `maker`.

    `pins_memory` puts batches made in this process into pinned memory; for those of workers, torch's loader does it.

    Attributes:
        dataset: the user's.
        collate_fn: makes a batch of a list of samples.
    """

    def __init__(self, dataset: Any, collate_fn: Callable[[list[Any]], Any], *, pins_memory: bool) -> None:
        self.dataset = dataset
        self.collate_fn = collate_fn
        self._pins_memory = pins_memory
        self._fetch_many = getattr(dataset, "__getitems__", None)
        self._may_read_columns = collate_fn is default_collate and _is_arrow_dataset_of_tensors(dataset)

    def __getitem__(self, request: Request) -> Any:
        """A batch, in a worker."""
        seed_host_generators(request.key)
        return self._fetch(request.indices)

    def maker(self) -> Callable[[Request], Any]:
        """A function that makes the batches of one pass in this process."""

        def make(request: Request) -> Any:
            with host_generators_seeded(request.key):
                batch = self._fetch(request.indices)
            return pinned(batch) if self._pins_memory else batch

        return make

    def _fetch(self, indices: Sequence[Any]) -> Any:
        if self._may_read_columns:
            columns = self.dataset[list(indices)]
            if all(isinstance(column, torch.Tensor) for column in columns.values()):
                return columns
            # Rows of different sizes, or not tensors: leave them to the collate function.
            self._may_read_columns = False
        samples = self._samples(indices)
        try:
            return self.collate_fn(samples)
        except Exception as error:
            self._add_note(error, f"the batch of samples {list(indices)}")
            raise

    def _samples(self, indices: Sequence[Any]) -> list[Any]:
        samples: list[Any] = []
        fetch_many, dataset = self._fetch_many, self.dataset
        try:
            if fetch_many is not None:
                return fetch_many(list(indices))  # type: ignore[no-any-return]
            for index in indices:  # Python calls `__getitem__` fastest from brackets like these
                samples.append(dataset[index])
        except Exception as error:
            is_one = fetch_many is None
            self._add_note(error, f"sample {indices[len(samples)]}" if is_one else f"one of samples {list(indices)}")
            raise
        return samples

    def _add_note(self, error: Exception, source: str) -> None:
        add_note(error, f"Raised for {source} of the {type(self.dataset).__name__}.")


def _is_arrow_dataset_of_tensors(dataset: Any) -> bool:
    """Whether this is a Hugging Face dataset of tensors, which can return the columns of a whole batch."""
    return type(dataset).__module__ == "datasets.arrow_dataset" and dataset.format["type"] == "torch"
