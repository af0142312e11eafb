"""Rows that need not fit: padded where their lengths differ, of mixed dtypes, or objects."""

from __future__ import annotations

import collections
import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from pytorch_accelerated.errors import DataError
from pytorch_accelerated.facts.trees import leaves_by_path, map_paths
from pytorch_accelerated.prediction.collecting import RowBlocks, filled, put_in_order, without_classes
from pytorch_accelerated.ranks.ranks import Ranks

Array = np.ndarray[Any, Any]

PADDING = -100
"""Fills up rows that are shorter than others: as a label, torch's losses ignore it."""


class PaddedRows:
    """Joins nested rows of batches, in dataset order, to the same numpy arrays on all processes.

    Args:
        ranks: the processes.
        joins: False to return lists of batches instead.
        paddings: by the name of rows of whole numbers: what fills up shorter ones instead of `PADDING`.
    """

    def __init__(self, ranks: Ranks, *, joins: bool = True, paddings: Mapping[str, int] | None = None) -> None:
        self._ranks = ranks
        self._joins = joins
        self._paddings = dict(paddings or {})
        self._structure: Any = None
        self._kinds: dict[str, tuple[Any, ...]] = {}
        self._columns: dict[str, _Column] = {}
        self._batches: dict[str, list[tuple[int, Array]]] = {}  # of objects, and those that are not joined

    def add(self, start: int, rows: Any) -> None:
        """Take the rows of one batch.

        Args:
            start: position of the first row in the whole pass.
            rows: tensors and arrays, or nested tuples, lists and dicts of them. Objects, one for each row, come in an
                array made by `as_objects`.

        Raises:
            DataError: if their kind differs from the first batch's.
        """
        rows_by_path = {path: _as_rows(leaf) for path, leaf in leaves_by_path(rows).items()}
        kinds = {path: _kind_of(leaf) for path, leaf in rows_by_path.items()}
        if self._structure is None:
            self._structure, self._kinds = map_paths(lambda path, _: path, rows), kinds
        if kinds != self._kinds:
            raise DataError(_complaint(f"the batch that begins at row {start}", kinds, self._kinds))
        for path, leaf in rows_by_path.items():
            if isinstance(leaf, torch.Tensor) and self._joins:
                if path not in self._columns:
                    self._columns[path] = _Column(self._padding(path, leaf))
                self._columns[path].add(start, {"": leaf})
            else:
                array = leaf.cpu().numpy().copy() if isinstance(leaf, torch.Tensor) else leaf
                self._batches.setdefault(path, []).append((start, array))

    def finish(self) -> Any:
        """The rows of all processes, structured as they came; None without any. All processes must call it."""
        per_rank = self._ranks.exchange((self._kinds, without_classes(self._structure)))
        known = [(kinds, structure) for kinds, structure in per_rank if kinds]
        if not known:
            return None
        kinds, structure = known[0]
        for other, _ in known:
            if other != kinds:
                raise DataError(_complaint("one process", other, kinds))
        joined = {path: self._join(path, is_tensor=kinds[path] != _OBJECTS) for path in kinds}
        return filled(self._structure or structure, joined)

    def _join(self, path: str, *, is_tensor: bool) -> Any:
        if is_tensor and self._joins:
            return self._columns.pop(path, _Column(PADDING)).joined(self._ranks)
        batches = itertools.chain(*self._ranks.exchange(self._batches.pop(path, [])))
        arrays = [array for _, array in sorted(batches, key=lambda batch: batch[0])]
        return np.concatenate(arrays) if self._joins else arrays

    def _padding(self, path: str, rows: torch.Tensor) -> float:
        paddings = (padding for name, padding in self._paddings.items() if path.startswith(f"[{name!r}]"))
        is_whole = not (rows.is_floating_point() or rows.is_complex())
        padding = next(paddings, PADDING) if is_whole else PADDING
        return torch.tensor(padding).to(rows.dtype).item()


class _Column(RowBlocks):
    """The rows of one output."""

    def __init__(self, padding: float) -> None:
        self._kept: collections.deque[torch.Tensor] = collections.deque()
        super().__init__(lambda block: self._kept.append(block[""]), padding=padding)

    def joined(self, ranks: Ranks) -> Array:
        """The rows of all ranks. Must be called by all ranks."""
        self.finish()
        facts = ranks.exchange((self.places, [(block.dtype, block.shape[1:]) for block in self._kept]))
        places = [own for own, _ in facts]
        dtypes, shapes = zip(*itertools.chain(*(kinds for _, kinds in facts)), strict=True)
        row_shape = max(shapes, key=lambda shape: shape[:1])
        rows = sum(place.rows for own in places for place in own)
        result = torch.empty((rows, *row_shape), dtype=functools.reduce(torch.promote_types, dtypes))
        put_in_order(ranks, self._kept, places, result, self._padding)
        return result.numpy()


_OBJECTS = ("objects",)


def _kind_of(rows: Any) -> tuple[Any, ...]:
    """What all batches must have in common: the number of dimensions, and the sizes from dimension 2 on."""
    return (rows.ndim, *rows.shape[2:]) if isinstance(rows, torch.Tensor) else _OBJECTS


def _complaint(where: str, found: dict[str, tuple[Any, ...]], expected: dict[str, tuple[Any, ...]]) -> str:
    differing = [path for path in {**expected, **found} if found.get(path) != expected.get(path)]
    told = ", ".join(f"{path or 'all'}: {found.get(path)} instead of {expected.get(path)}" for path in differing)
    return (
        f"The outputs for {where} differ from those before it (number of dimensions, and sizes from dimension 2 on: "
        f"{told}). Only the length of rows may differ. Make the others equal, or leave them out with `ignore_keys`."
    )


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
    if leaf.dtype is torch.bfloat16:
        leaf = leaf.float()  # numpy has no such dtype
    return leaf[None] if leaf.ndim == 0 else leaf


def remove_padding(padded_tensor: torch.Tensor, pad_value: float) -> torch.Tensor:
    """The rows of `padded_tensor` that are not padding.

    A row is padding if all its entries equal `pad_value`, so choose a value that real rows never consist of. A row
    without entries is not padding.

    Args:
        padded_tensor: at least one dimension; the first one counts rows.
        pad_value: the value of padding; may be NaN.

    Returns:
        The remaining rows, in the same order.
    """
    if padded_tensor.shape[1:].numel() == 0:
        return padded_tensor
    is_padding = padded_tensor.isnan() if math.isnan(pad_value) else padded_tensor == pad_value
    if padded_tensor.ndim > 1:
        is_padding = is_padding.flatten(start_dim=1).all(dim=1)
    return padded_tensor[~is_padding]
