"""Batches of a `datasets.Dataset` without a format, read as whole columns instead of rows of Python's numbers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from torch.utils.data import default_collate

# The values of each column in a batch: numbers in one or two dimensions; None for a column of text or of nothing.
Columns = Mapping[str, "torch.Tensor | None"]
# Makes a batch of columns; None if only the collate function can.
OfColumns = Callable[[Columns], "dict[str, torch.Tensor] | None"]
_CollateFn = TypeVar("_CollateFn", bound=Callable[..., Any])

# Types by Arrow's names. Other numbers become other types in Python, or are too large for torch.
_NUMBERS = frozenset({"bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "float", "double"})
_LISTS = ("list<", "large_list<")
_WITHOUT_NUMBERS = frozenset({"string", "large_string", "null"})
# Other features may decode what is stored.
_PLAIN_FEATURES = frozenset({"Value", "ClassLabel", "List", "LargeList", "Sequence"})

_declared: dict[Any, OfColumns] = {}


class CollatesColumns(ABC):
    """A collate function that may also make the same batches of columns."""

    @abstractmethod
    def of_columns(self) -> OfColumns | None:
        """The function that does it; None if there is none."""


def also_of_columns(of_columns: OfColumns) -> Callable[[_CollateFn], _CollateFn]:
    """Declare that `of_columns` makes the same batches as the decorated collate function."""

    def declare(collate_fn: _CollateFn) -> _CollateFn:
        _declared[collate_fn] = of_columns
        return collate_fn

    return declare


def find_of_columns(collate_fn: Any) -> OfColumns | None:
    """The function that makes the batches of `collate_fn` of columns, if there is one."""
    if isinstance(collate_fn, CollatesColumns):
        return collate_fn.of_columns()
    return next((of_columns for function, of_columns in _declared.items() if function is collate_fn), None)


def as_python_numbers(values: torch.Tensor, floats: torch.dtype) -> torch.Tensor:
    """`values` in the type of a tensor of Python's numbers: int64, bool or `floats`."""
    if values.is_floating_point():
        return values.to(floats)
    return values if values.dtype == torch.bool else values.to(torch.int64)


def _as_default_collate(columns: Columns) -> dict[str, torch.Tensor] | None:
    numbers = {name: values for name, values in columns.items() if values is not None and values.ndim == 1}
    if len(numbers) < len(columns):
        return None  # lists are transposed
    return {name: as_python_numbers(values, torch.float64) for name, values in numbers.items()}


also_of_columns(_as_default_collate)(default_collate)


class ColumnReader:
    """Reads the batches of a dataset by columns.

    Args:
        dataset: must be a dataset without a format; see `column_reader`.
        of_columns: makes a batch of columns.
    """

    __slots__ = ("_dataset", "_format", "_of_columns", "_tables")

    def __init__(self, dataset: Any, of_columns: OfColumns) -> None:
        self._dataset = dataset
        self._format = dataset.format
        self._tables = dataset.with_format("arrow")
        self._of_columns = of_columns

    def __reduce__(self) -> tuple[Any, ...]:
        return ColumnReader, (self._dataset, self._of_columns)

    def read(self, indices: Sequence[Any]) -> dict[str, torch.Tensor] | None:
        """The batch of these rows; None if it has to be made of rows, which also raises the error if they are wrong."""
        if self._dataset.format != self._format:
            return None
        try:
            table = self._tables[list(indices)]
            return self._of_columns(dict(zip(table.column_names, map(_values_of, table.columns), strict=True)))
        except (_NotReadableError, IndexError, TypeError, ValueError):
            return None


def column_reader(dataset: Any, collate_fn: Any) -> ColumnReader | None:
    """A reader that makes the same batches of `dataset` as `collate_fn`; None if they are not known to be the same."""
    of_columns = find_of_columns(collate_fn)
    kind = type(dataset)
    if of_columns is None or (kind.__module__, kind.__name__) != ("datasets.arrow_dataset", "Dataset"):
        return None
    has_all = dataset.format["type"] is None and dataset.format["columns"] == dataset.column_names
    return ColumnReader(dataset, of_columns) if has_all and all(map(_is_plain, dataset.features.values())) else None


class _NotReadableError(Exception):
    """A column is not one tensor."""


def _is_plain(feature: Any) -> bool:
    """Whether Python gets the values of a column as they are stored."""
    kind = type(feature)
    if kind.__name__ not in _PLAIN_FEATURES or not kind.__module__.startswith("datasets.features."):
        return False
    return not hasattr(feature, "feature") or _is_plain(feature.feature)


def _values_of(column: Any) -> torch.Tensor | None:
    kind = str(column.type)
    if kind in _WITHOUT_NUMBERS:
        return None
    array = column.combine_chunks()
    if array.null_count or not len(array):
        raise _NotReadableError
    if not kind.startswith(_LISTS):
        return _numbers_of(array)
    offsets = array.offsets.to_numpy()
    sizes = np.diff(offsets)
    if sizes[0] == 0 or (sizes != sizes[0]).any():
        raise _NotReadableError
    return _numbers_of(array.flatten()).view(len(array), -1)


def _numbers_of(array: Any) -> torch.Tensor:
    if array.null_count or str(array.type) not in _NUMBERS:
        raise _NotReadableError
    return torch.from_numpy(array.to_numpy(zero_copy_only=False).copy())
