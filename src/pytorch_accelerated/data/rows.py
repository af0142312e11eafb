"""Fetches rows of map-style datasets: of arrays in memory a whole batch at once, of others one by one under a key.

Rows of other datasets are fetched in this process or in workers, with the same randomness in both cases.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Sampler, Subset, TensorDataset, default_collate, get_worker_info

from pytorch_accelerated.data.sampling import Cell
from pytorch_accelerated.data.workers import begin_pass, end_pass, like_loader, pins_memory, seed_workers
from pytorch_accelerated.errors import DataError
from pytorch_accelerated.facts.error_notes import add_note
from pytorch_accelerated.facts.seeding import aside, seed_host_generators, without_second_numbers
from pytorch_accelerated.facts.trees import leaves, leaves_by_path, map_leaves, plain_parts_of, rebuilt
from pytorch_accelerated.ranks.compat.torch import pinned

_BATCHES_AT_ONCE = 16
_ALIGNMENT = 64  # bytes: where torch's allocators on CPUs begin a tensor
# Where putting the generators aside takes longer than a small step may wait, several batches are fetched at a time.
_BATCHES_AHEAD, _BYTES_AHEAD = 8, 2**18


class ArrayDataset(Dataset[Any]):
    """Rows of tensors, arrays, or tuples and dicts of them, as a map-style dataset.

    A sample has the structure of `data`, with one row of each array. `fetch` returns a whole batch, with the structure,
    dtypes and values that torch's `default_collate` would give. Batches never share memory with the data.

    Args:
        data: a tensor, an array, or a tuple or dict of them (nested dicts too), all of one length.
        indices: the rows that belong to the dataset, in order; int64, one dimension. None: all rows.

    Raises:
        DataError: if the arrays have different lengths, or one has no rows.
    """

    def __init__(self, data: Any, indices: torch.Tensor | None = None) -> None:
        self.data = data
        self.indices = indices
        arrays = leaves_by_path(data, "data", parts=plain_parts_of)
        tensors = [_as_tensor(name, array) for name, array in arrays.items()]
        lengths = {name: len(array) for name, array in arrays.items()}
        if len(set(lengths.values())) != 1:
            found = ", ".join(f"{name} has {length}" for name, length in lengths.items()) or "there are no arrays"
            raise DataError(
                f"The arrays of a dataset must have one row per sample each, but {found}. Pass arrays of one length."
            )
        self._rows = next(iter(lengths.values()))
        known = [tensor for tensor in tensors if tensor is not None]
        # If torch has no dtype for one of the arrays (strings, objects), samples are fetched one by one instead.
        self._tensors = known if len(known) == len(tensors) else None
        is_flat = type(data) in (tuple, list) and all(map(_is_array, data))
        self._assemble: Callable[[Iterable[torch.Tensor]], Any] = list if is_flat else partial(_assembled, data)

    def __len__(self) -> int:
        return self._rows if self.indices is None else len(self.indices)

    def __getitem__(self, index: int) -> Any:
        row = index if self.indices is None else int(self.indices[index])
        return map_leaves(lambda array: array[row], self.data, parts=plain_parts_of)

    def fetch(self, indices: torch.Tensor | slice) -> Any:
        """The batch of the samples at `indices`: an int64 tensor on the CPU, or a slice of step 1."""
        if self._tensors is None:
            positions = range(len(self))[indices] if isinstance(indices, slice) else indices.tolist()
            return default_collate([self[index] for index in positions])
        if self.indices is not None:
            indices = self.indices[indices]
        return self._assemble([_rows_at(indices, tensor) for tensor in self._tensors])

    def fetch_many(self, indices: torch.Tensor, sizes: Sequence[int]) -> list[Any]:
        """Batches of these sizes of the samples at `indices`, cut from one copy. They do not overlap in memory."""
        if self._tensors is None:
            return [self.fetch(part) for part in torch.split(indices, list(sizes))]
        rows = indices if self.indices is None else self.indices[indices]
        # "Unsafe" only if the copy itself were written to. The parts of the safe `split` can't be written to where
        # gradients flow.
        parts = [torch.unsafe_split_with_sizes(_rows_at(rows, tensor), sizes) for tensor in self._tensors]
        return [self._assemble(map(_aligned, batch)) for batch in zip(*parts, strict=True)]


def as_array_dataset(dataset: Any) -> ArrayDataset | None:
    """`dataset` as an `ArrayDataset`, if it is data in memory, else None.

    Only exact types are converted: a subclass of `TensorDataset` or `Subset` may have changed its samples.
    """
    if type(dataset) is ArrayDataset:
        return dataset
    if type(dataset) is TensorDataset:
        return ArrayDataset(dataset.tensors) if all(map(_is_array, dataset.tensors)) else None
    if type(dataset) is Subset:
        whole = as_array_dataset(dataset.dataset)
        if whole is None:
            return None
        indices = torch.as_tensor(dataset.indices, dtype=torch.int64)
        indices = torch.where(indices < 0, indices + len(whole), indices)  # counted from the end, as in a list
        return ArrayDataset(whole.data, indices if whole.indices is None else whole.indices[indices])
    # Without any array among its items, a tuple is a sequence of samples.
    is_columns = type(dataset) is tuple and any(isinstance(item, (torch.Tensor, np.ndarray)) for item in dataset)
    return ArrayDataset(dataset) if is_columns or _is_array(dataset) or type(dataset) is dict else None


def _is_array(value: Any) -> bool:
    return (type(value) is torch.Tensor and value.layout == torch.strided) or type(value) in (np.ndarray, np.memmap)


def _as_tensor(name: str, array: Any) -> torch.Tensor | None:
    """A tensor that shares the memory of an array with rows; None if torch has no such dtype."""
    if not _is_array(array):
        kind = f"of type {type(array).__name__}" if not isinstance(array, torch.Tensor) else "not a dense tensor"
        raise DataError(
            f"{name} of the dataset is {kind}, but rows can be taken only from dense tensors and numpy arrays, in "
            "plain tuples, lists and dicts. Pass these, or a torch Dataset that returns one sample for an "
            "index. `torch.tensor(labels)` makes a tensor of a list; `np.unique(labels, return_inverse=True)[1]` makes "
            "class numbers of texts."
        )
    if array.ndim == 0:
        raise DataError(f"{name} of the dataset is a single number, without rows. Pass one row per sample.")
    if isinstance(array, torch.Tensor):
        return array
    with warnings.catch_warnings():
        # A read-only array is fine: batches are copies.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        try:
            return torch.from_numpy(array)
        except (TypeError, ValueError):  # no such dtype, or negative strides
            return None


def _assembled(data: Any, tensors: Iterable[torch.Tensor]) -> Any:
    """`tensors` in the structure of `data`, with lists in place of tuples, as `default_collate` does it."""
    tensors, parts = iter(tensors), plain_parts_of(data)
    if parts is None:
        return next(tensors)
    batch = [_assembled(part, tensors) for part in parts]
    return rebuilt(data, batch) if type(data) is dict else batch


def _aligned(part: torch.Tensor) -> torch.Tensor:
    """`part` at an address like that of a new tensor: bits of a product depend on it, and parts begin elsewhere after a
    resume.
    """
    return part.clone() if part.data_ptr() % _ALIGNMENT else part


def _rows_at(indices: torch.Tensor | slice, tensor: torch.Tensor) -> torch.Tensor:
    """A copy of these rows."""
    if isinstance(indices, slice):
        return tensor[indices].clone(memory_format=torch.contiguous_format)
    if tensor.ndim == 1 and tensor.dtype in (torch.uint16, torch.uint32, torch.uint64):
        return tensor[indices]  # many times slower for large rows, but index_select does not support these
    return tensor.index_select(0, indices.to(tensor.device))


class Request(NamedTuple):
    """One batch to fetch.

    `key` seeds torch, numpy and random while the batch is fetched and collated. It depends on the batch only, not on
    the worker or on earlier batches, so augmentations are the same with any number of workers and after a resume.
    """

    indices: Sequence[Any]
    key: int


class RowBatches(Dataset[Any]):
    """The batches of `dataset` by `Request`. Workers get a copy of this object.

    Attributes:
        dataset: the user's.
        collate_fn: makes a batch of a list of samples.
    """

    def __init__(self, dataset: Any, collate_fn: Callable[[list[Any]], Any]) -> None:
        self.dataset = dataset
        self.collate_fn = collate_fn
        self._fetch_many = getattr(dataset, "__getitems__", None)
        # A Hugging Face dataset of tensors can return the columns of a whole batch.
        is_of_hub = collate_fn is default_collate and type(dataset).__module__ == "datasets.arrow_dataset"
        self._may_read_columns = is_of_hub and dataset.format["type"] == "torch"

    def __getitem__(self, request: Request) -> Any:
        """The batch of a request."""
        # In a worker, nothing draws between the batches, each of which is seeded.
        return aside(self._fetch, request) if get_worker_info() is None else self._fetch(request)

    def in_blocks(self, requests: Iterator[Request]) -> Iterator[Any]:
        """The batches of `requests`. Small ones are fetched several in a row, so the generators are put aside once."""
        count = 1
        while block := list(itertools.islice(requests, count)):
            batches, error = aside(self._fetch_block, block)
            yield from batches
            if error is not None:
                raise error
            count = _batches_ahead(batches[-1])

    def _fetch_block(self, requests: Iterable[Request]) -> tuple[list[Any], Exception | None]:
        """The batches before the first error, and that: the loop trains on those before it fails."""
        batches: list[Any] = []
        try:
            for request in requests:
                batches.append(self._fetch(request))
        except Exception as error:
            return batches, error
        return batches, None

    def _fetch(self, request: Request) -> Any:
        indices = request.indices
        seed_host_generators(request.key)
        if self._may_read_columns:  # one read of the table, instead of one for each row and a collation
            columns = self.dataset[list(indices)]
            if all(isinstance(column, torch.Tensor) for column in columns.values()):
                return columns
            # Rows of different sizes, or not tensors: leave them to the collate function.
            self._may_read_columns = False
        dataset, samples = self.dataset, list[Any]()
        try:
            if self._fetch_many is not None:
                samples = self._fetch_many(list(indices))
            else:
                for index in indices:  # Python calls `__getitem__` fastest from brackets like these
                    samples.append(dataset[index])
            return self.collate_fn(samples)
        except Exception as error:
            is_one = self._fetch_many is None and len(samples) < len(indices)
            source = f"sample {indices[len(samples)]}" if is_one else f"the batch of samples {list(indices)}"
            add_note(error, f"Raised for {source} of the {type(dataset).__name__}.")
            raise


class BatchFetcher:
    """Fetches the batches of a map-style dataset, with the collate function and the worker settings of `loader`.

    The sampler of `loader` is not used. Workers are seeded with `seed`, so nothing is drawn from torch's generator.

    Args:
        loader: the user's.
        seed: of the workers.
    """

    def __init__(self, loader: DataLoader[Any], *, seed: int) -> None:
        is_plain = loader.collate_fn is default_collate
        self._arrays = as_array_dataset(loader.dataset) if is_plain else None
        self._pins_memory = pins_memory(loader)
        # A collate function of the user's own may fill one and the same batch again and again.
        self._reads_ahead = is_plain and getattr(loader, "reads_ahead", False)
        self._loader: DataLoader[Any] | None = None
        self._pass: Iterator[Any] | None = None
        self.is_vectorised = self._arrays is not None
        if self.is_vectorised:
            return  # a worker would take longer to send a batch than this process takes to cut it out
        self._rows = RowBatches(loader.dataset, loader.collate_fn)
        if loader.num_workers > 0:
            self._requests = _PendingRequests()
            self._loader = like_loader(loader, self._rows, sampler=self._requests)
            seed_workers(self._loader, "workers", seed)

    def fetch(self, requests: Iterator[Request]) -> Iterator[Any]:
        """The batches of `requests`, in order. One pass at a time."""
        if self._loader is None:
            batches: Iterator[Any] = map(self._rows.__getitem__, requests)
            if self._reads_ahead:
                batches = without_second_numbers(self._rows.in_blocks(requests))
            return map(pinned, batches) if self._pins_memory else batches
        self._requests.pending = requests
        self._pass = begin_pass(self._loader)
        return without_second_numbers(self._pass)

    def fetch_cells(self, order: Sequence[int] | torch.Tensor, cells: Iterator[Cell]) -> Iterator[Any]:
        """The batches of `cells`, for vectorised data. Several are fetched at a time, which takes a third less.

        `order` has the rows by position: an int64 tensor, or a range from 0.
        """
        assert self._arrays is not None
        while block := list(itertools.islice(cells, _BATCHES_AT_ONCE)):
            rows: list[Any] = [order[start : start + (size or 1)] for start, size in block]
            if isinstance(order, torch.Tensor):
                batches: Iterable[Any] = self._arrays.fetch_many(torch.cat(rows), [len(each) for each in rows])
            else:
                batches = [self._arrays.fetch(slice(each.start, each.stop)) for each in rows]
            yield from map(pinned, batches) if self._pins_memory else batches

    def close(self) -> None:
        """End worker processes. The next pass starts new ones."""
        end_pass(self._loader, self._pass)
        self._pass = None


def _batches_ahead(batch: Any) -> int:
    """How many batches like this one are fetched in a row: one, if it is large or its size is unknown."""
    sizes = [getattr(leaf, "nbytes", _BYTES_AHEAD) for leaf in leaves(batch)]
    return max(1, min(_BATCHES_AHEAD, _BYTES_AHEAD // max(1, sum(sizes))))


class _PendingRequests(Sampler[Request]):
    """The requests of the next pass. A loader with persistent workers always keeps the same sampler."""

    def __init__(self) -> None:
        self.pending: Iterable[Request] = ()

    def __iter__(self) -> Iterator[Request]:
        return iter(self.pending)
