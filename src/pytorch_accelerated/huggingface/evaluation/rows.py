"""Rows of nested outputs, batch by batch from all processes, put below each other as arrays.

Rows leave the device as they come. Beyond `MEMORY_BYTES` on a process they wait, and are joined, in temporary files,
so that a long evaluation needs no more memory than a short one.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pytorch_accelerated.errors import DataError
from pytorch_accelerated.processes.ranks import Ranks

Array = np.ndarray[Any, Any]

MEMORY_BYTES = 2**30
PADDING = -100
"""What fills up rows that are shorter than others: what torch's losses ignore as a label."""
_EXCHANGE_BYTES = 64 * 2**20


class RowCollector:
    """Takes nested rows of batches and joins them, in the order of the dataset, to the same arrays on all processes.

    Args:
        ranks: the processes.
        folder: where temporary files go.
        joins: False to keep a list of batches instead.
        batches_on_device: how many batches stay on the device before they are brought to the host together.
        memory_bytes: what rows may take up in host memory until they go to a file.
        paddings: by the name of rows of whole numbers, what fills up shorter ones instead of `PADDING`.
    """

    def __init__(
        self,
        ranks: Ranks,
        folder: Path,
        *,
        joins: bool = True,
        batches_on_device: int = 1,
        memory_bytes: int = MEMORY_BYTES,
        paddings: Mapping[str, int] | None = None,
    ) -> None:
        self._ranks = ranks
        self._paddings = dict(paddings or {})
        self._joins = joins
        self._batches_on_device = batches_on_device
        self._on_device: list[tuple[int, Any]] = []
        self._store = _ArrayStore(folder, memory_bytes)
        self._structure: Any = None
        self._starts: list[int] = []
        self._leaves: dict[str, list[Array]] = {}

    def add(self, start: int, rows: Any) -> None:
        """Take the rows of one batch.

        Args:
            start: position of the first of them in the order of the whole pass.
            rows: tensors and arrays, or nested tuples, lists and dicts of them; lists of other objects, one for each
                row, are told by `as_objects`.
        """
        self._on_device.append((start, rows))
        if len(self._on_device) >= self._batches_on_device:
            self._settle()

    def finish(self) -> Any:
        """The rows of all processes, structured as they came; None without any. Must be called by all processes."""
        self._settle()
        everyones = self._ranks.exchange((self._starts, self._structure))
        structure = next((structure for starts, structure in everyones if starts), None)
        if structure is None:
            return None
        order = _order_of_batches([starts for starts, _ in everyones])
        joined = {path: self._join(path, order) for path in _paths(structure)}
        return _map_leaves(lambda path, _: joined[path], structure)

    def _settle(self) -> None:
        """Bring to the host what is still on the device."""
        for start, rows in self._on_device:
            leaves: dict[str, Array] = {}
            structure = _map_leaves(functools.partial(_keep, leaves), rows)
            if self._structure is None:
                self._structure = structure
                self._leaves = {path: [] for path in leaves}
            if leaves.keys() != self._leaves.keys():
                raise DataError(
                    f"The outputs for the batch that begins at row {start} are {', '.join(leaves) or 'nothing'}, but "
                    f"those before it were {', '.join(self._leaves)}. Return the same kinds of outputs for every "
                    "batch; leave out others with `ignore_keys`."
                )
            self._starts.append(start)
            for path, array in leaves.items():
                self._leaves[path].append(self._store.put(array))
        self._on_device.clear()

    def _join(self, path: str, order: list[tuple[int, int]]) -> Any:
        own = self._leaves.pop(path, [])
        everyones = self._ranks.exchange([(array.dtype.str, array.shape) for array in own])
        kinds = [everyones[rank][index] for rank, index in order]
        if any(dtype == "|O" for dtype, _ in kinds):
            lists = self._ranks.exchange([list(array) for array in own])
            batches = [as_objects(lists[rank][index]) for rank, index in order]
            return np.concatenate(batches) if self._joins else batches
        batches = self._batches_of_all(own, everyones, order)
        if not self._joins:
            return list(batches)
        dtype = np.result_type(*(np.dtype(dtype) for dtype, _ in kinds))
        result = self._store.empty(_joint_shape(path, [shape for _, shape in kinds]), dtype)
        padding = self._padding(path, dtype)
        position = 0
        for array in batches:
            rows = result[position : position + len(array)]
            if rows.shape != array.shape:
                rows[...] = np.array(padding).astype(dtype)
            rows[tuple(slice(size) for size in array.shape)] = array
            position += len(array)
        return result

    def _padding(self, path: str, dtype: np.dtype[Any]) -> int:
        is_whole = np.issubdtype(dtype, np.integer)
        paddings = (padding for name, padding in self._paddings.items() if path.startswith(f"[{name!r}]"))
        return next(paddings, PADDING) if is_whole else PADDING

    def _batches_of_all(self, own: list[Array], everyones: list[list[Any]], order: list[tuple[int, int]]) -> Any:
        """The batches of all processes in order; they are let go one by one."""
        own.reverse()
        if self._ranks.count == 1:
            while own:
                yield own.pop()
            return
        arrived: dict[tuple[int, int], Array] = {}
        fetched = 0
        for rank, index in order:
            while (rank, index) not in arrived:
                last = _end_of_block(everyones, fetched)
                block = [own.pop() for _ in range(max(0, min(last - fetched, len(own))))]
                arrived.update(self._exchange_block(block, everyones, fetched, last))
                fetched = last
            yield arrived.pop((rank, index))

    def _exchange_block(
        self, block: list[Array], everyones: list[list[Any]], first: int, last: int
    ) -> dict[tuple[int, int], Array]:
        """Batches `first` to `last` of each process."""
        octets = [np.ascontiguousarray(array).reshape(-1).view(np.uint8) for array in block]
        sent = torch.from_numpy(np.concatenate(octets) if octets else np.empty(0, np.uint8))
        received = self._ranks.gather(sent).numpy()
        batches: dict[tuple[int, int], Array] = {}
        position = 0
        for rank, kinds in enumerate(everyones):
            for index, (dtype, shape) in enumerate(kinds[first:last], start=first):
                size = _size_bytes(dtype, shape)
                batches[rank, index] = received[position : position + size].view(dtype).reshape(shape)
                position += size
        return batches


class _ArrayStore:
    """Keeps arrays in memory, and beyond a size in temporary files, which vanish when nobody uses them any more."""

    def __init__(self, folder: Path, memory_bytes: int) -> None:
        self._folder = folder
        self._left_bytes = memory_bytes

    def put(self, array: Array) -> Array:
        if array.dtype == object or self._has_room(array.nbytes):
            return array
        stored = self._in_file(array.shape, array.dtype)
        stored[...] = array
        return stored

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        size_bytes = _size_bytes(dtype.str, shape)
        return np.empty(shape, dtype) if self._has_room(size_bytes) else self._in_file(shape, dtype)

    def _has_room(self, size_bytes: int) -> bool:
        self._left_bytes -= size_bytes
        return self._left_bytes >= 0

    def _in_file(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        self._folder.mkdir(parents=True, exist_ok=True)
        if not _size_bytes(dtype.str, shape):
            return np.empty(shape, dtype)
        with tempfile.TemporaryFile(dir=self._folder) as file:  # its mapping outlives it
            return np.memmap(file, dtype=dtype, mode="w+", shape=shape)


def as_objects(values: Sequence[Any]) -> Array:
    """An array of objects, one for each row."""
    array = np.empty(len(values), dtype=object)
    array[:] = values
    return array


def _keep(leaves: dict[str, Array], path: str, leaf: Any) -> None:
    leaves[path] = _on_host(leaf)


def _on_host(leaf: Any) -> Array:
    if isinstance(leaf, torch.Tensor):
        leaf = leaf.detach().cpu()
        if leaf.dtype is torch.bfloat16:
            leaf = leaf.float()  # which numpy has no dtype for
        leaf = leaf.numpy().copy()  # its owner may go on using the memory
    return np.atleast_1d(np.asarray(leaf))


def _map_leaves(function: Callable[[str, Any], Any], data: Any, path: str = "") -> Any:
    """`data` with `function` of path and leaf in place of each leaf; mappings become dicts, named tuples tuples."""
    if isinstance(data, Mapping):
        return {key: _map_leaves(function, item, f"{path}[{key!r}]") for key, item in data.items()}
    if isinstance(data, (tuple, list)):
        items = [_map_leaves(function, item, f"{path}[{index}]") for index, item in enumerate(data)]
        return tuple(items) if isinstance(data, tuple) else items
    return function(path, data)


def _paths(structure: Any) -> list[str]:
    paths: list[str] = []
    _map_leaves(lambda path, _: paths.append(path), structure)
    return paths


def _order_of_batches(starts: list[list[int]]) -> list[tuple[int, int]]:
    """All batches, as rank and number on that rank, in the order of the rows."""
    placed = [(start, rank, index) for rank, theirs in enumerate(starts) for index, start in enumerate(theirs)]
    return [(rank, index) for _, rank, index in sorted(placed)]


def _joint_shape(path: str, shapes: list[tuple[int, ...]]) -> tuple[int, ...]:
    """Of all batches below each other, each as long in dimension 1 as the longest.

    Raises:
        DataError: if they differ in more than that.
    """
    if len({(len(shape), shape[2:]) for shape in shapes}) > 1:
        raise DataError(
            f"The outputs{path} of the batches have rows of the shapes "
            f"{', '.join(sorted({str(shape[1:]) for shape in shapes}))}. Only their first dimension may differ: it is "
            f"filled up with {PADDING}. Make the others equal, or leave these outputs out with `ignore_keys`."
        )
    longest = max(shape[1:2] for shape in shapes)
    return (sum(shape[0] for shape in shapes), *longest, *shapes[0][2:])


def _size_bytes(dtype: str, shape: Sequence[int]) -> int:
    return int(np.dtype(dtype).itemsize * np.prod(shape, dtype=np.int64))


def _end_of_block(everyones: list[list[Any]], first: int) -> int:
    """How many batches of each process travel together, from number `first` on."""
    longest, last, size_bytes = max(map(len, everyones)), first, 0
    while last < longest and (last == first or size_bytes < _EXCHANGE_BYTES):
        size_bytes += sum(_size_bytes(*kinds[last]) for kinds in everyones if last < len(kinds))
        last += 1
    return last
