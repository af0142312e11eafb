"""Rows that need not fit: padded where their lengths differ, of several dtypes, or objects; in memory or in files.

Beyond `MEMORY_BYTES` on a process, rows wait in temporary files and are joined there, so that a long evaluation needs
no more memory than a short one.
"""

from __future__ import annotations

import collections
import functools
import itertools
import math
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pytorch_accelerated.errors import DataError
from pytorch_accelerated.prediction.arriving import ArrivingRows
from pytorch_accelerated.prediction.joining import Kind, exchange_blocks, put_in_order
from pytorch_accelerated.prediction.nested import Leaves, filled, without_classes
from pytorch_accelerated.prediction.pieces import Piece
from pytorch_accelerated.processes.ranks import Ranks
from pytorch_accelerated.trees import leaves, leaves_by_path, map_paths

Array = np.ndarray[Any, Any]

MEMORY_BYTES = 2**30
PADDING = -100
"""Fills up rows that are shorter than others: as a label, torch's losses ignore it."""


class PaddedRows:
    """Joins nested rows of batches, in dataset order, to the same numpy arrays on all processes.

    Args:
        ranks: the processes.
        folder: where temporary files go.
        joins: False to return lists of batches instead.
        batches_on_device: number of batches that stay on the device until they are brought to the host together.
        memory_bytes: size of the rows in host memory from which on they go to files.
        paddings: by the name of rows of whole numbers: what fills up shorter ones instead of `PADDING`.
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
        self._store = _Store(folder, memory_bytes)
        self._arriving = ArrivingRows(self._keep, batches_on_device=batches_on_device, keeps_rows=True)
        self._structure: Any = None
        self._starts: list[int] = []
        self._batches: dict[str, collections.deque[Any]] = {}  # tensors, and arrays of objects

    def add(self, start: int, rows: Any) -> None:
        """Take the rows of one batch.

        Args:
            start: position of the first row in the whole pass.
            rows: tensors and arrays, or nested tuples, lists and dicts of them. Objects, one for each row, come in an
                array made by `as_objects`.
        """
        rows_by_path = {path: _as_rows(leaf) for path, leaf in leaves_by_path(rows).items()}
        if self._structure is None:
            self._structure = map_paths(lambda path, _: path, rows)
            self._batches = {path: collections.deque() for path in rows_by_path}
        if rows_by_path.keys() != self._batches.keys():
            raise DataError(
                f"The outputs for the batch that begins at row {start} are {', '.join(rows_by_path) or 'nothing'}, but "
                f"those before it were {', '.join(self._batches)}. Return the same kinds of outputs for every "
                "batch; leave out others with `ignore_keys`."
            )
        self._starts.append(start)
        self._arriving.add(rows_by_path)

    def finish(self) -> Any:
        """The rows of all processes, structured as they came; None without any. All processes must call it."""
        self._arriving.finish()
        everyones = self._ranks.exchange((self._starts, without_classes(self._structure)))
        structure = next((structure for starts, structure in everyones if starts), None)
        if structure is None:
            return None
        places = [
            (start, rank, index) for rank, (starts, _) in enumerate(everyones) for index, start in enumerate(starts)
        ]
        order = [(rank, index) for _, rank, index in sorted(places)]
        joined = {path: self._join(path, order) for path in leaves(structure)}
        return filled(self._structure if self._starts else structure, joined)

    def _keep(self, batch: Leaves) -> None:
        for path, rows in batch.items():
            self._batches[path].append(self._store.put(rows))

    def _join(self, path: str, order: list[tuple[int, int]]) -> Any:
        own = self._batches.pop(path, collections.deque())
        kinds = self._ranks.exchange([_kind_of(batch) for batch in own])
        if None in itertools.chain(*kinds):
            lists = self._ranks.exchange([batch.tolist() for batch in own])
            objects = [as_objects(lists[rank][index]) for rank, index in order]
            return np.concatenate(objects) if self._joins else objects
        groups = exchange_blocks(self._ranks, own, kinds)
        if not self._joins:
            batches = {place: batch for group in groups for place, batch in group.items()}
            return [batches[place].numpy() for place in order]
        shapes = [kinds[rank][index][1] for rank, index in order]
        dtype = np.result_type(*{_numpy_dtype(dtype) for theirs in kinds for dtype, _ in theirs})
        result = self._store.empty(_joint_shape(path, shapes), dtype)
        target = torch.from_numpy(result)
        pieces = [Piece(rank, index, 0, shape[0]) for (rank, index), shape in zip(order, shapes, strict=True)]
        put_in_order(target, pieces, groups, torch.tensor(self._padding(path, dtype)).to(target.dtype))
        return result

    def _padding(self, path: str, dtype: np.dtype[Any]) -> int:
        is_whole = np.issubdtype(dtype, np.integer)
        paddings = (padding for name, padding in self._paddings.items() if path.startswith(f"[{name!r}]"))
        return next(paddings, PADDING) if is_whole else PADDING


class _Store:
    """Keeps rows in memory, and beyond a size in temporary files, which vanish when nobody uses them any more."""

    def __init__(self, folder: Path, memory_bytes: int) -> None:
        self._folder = folder
        self._left_bytes = memory_bytes

    def put(self, rows: Any) -> Any:
        if not isinstance(rows, torch.Tensor):
            return rows
        if rows.dtype is torch.bfloat16:
            rows = rows.float()  # numpy has no such dtype
        if self._has_room(rows.nbytes):
            return rows
        stored = self._in_file(tuple(rows.shape), _numpy_dtype(rows.dtype))
        stored[...] = rows.numpy()
        return torch.from_numpy(stored)

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        size_bytes = dtype.itemsize * math.prod(shape)
        return np.empty(shape, dtype) if self._has_room(size_bytes) else self._in_file(shape, dtype)

    def _has_room(self, size_bytes: int) -> bool:
        self._left_bytes -= size_bytes
        return self._left_bytes >= 0

    def _in_file(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        if not math.prod(shape):
            return np.empty(shape, dtype)
        self._folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=self._folder) as file:  # its mapping outlives it
            return np.memmap(file, dtype=dtype, mode="w+", shape=shape)


def as_objects(values: Sequence[Any]) -> Array:
    """An array of objects, one for each row."""
    array = np.empty(len(values), dtype=object)
    array[:] = values
    return array


def _as_rows(leaf: Any) -> Any:
    """A tensor with at least one dimension; an array of objects for what torch has no dtype for."""
    if not isinstance(leaf, torch.Tensor):
        array = np.atleast_1d(np.asarray(leaf))
        try:
            leaf = torch.from_numpy(np.array(array))
        except (TypeError, ValueError):
            return array if array.dtype == object else as_objects(array.tolist())
    return leaf[None] if leaf.ndim == 0 else leaf


def _kind_of(rows: Any) -> Kind | None:
    return (rows.dtype, tuple(rows.shape)) if isinstance(rows, torch.Tensor) else None


@functools.cache
def _numpy_dtype(dtype: torch.dtype) -> np.dtype[Any]:
    found: np.dtype[Any] = torch.empty(0, dtype=dtype).numpy().dtype
    return found


def _joint_shape(path: str, shapes: list[tuple[int, ...]]) -> tuple[int, ...]:
    """The shape of all batches below each other, each as long in dimension 1 as the longest.

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
