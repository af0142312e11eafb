"""Batches: the default collator, and the removal of columns that a model does not take."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset

from pytorch_accelerated.data.arrow import (
    CollatesColumns,
    Columns,
    OfColumns,
    also_of_columns,
    as_python_numbers,
    find_of_columns,
)
from pytorch_accelerated.errors import DataError

# The labels of this task are two positions, whose names do not contain "label".
_SPAN_TASK, _SPAN_LABELS = "QuestionAnswering", ("start_positions", "end_positions")
# Columns that become "labels".
_LABELS = ("label", "label_ids")


def _batch_of_columns(columns: Columns) -> dict[str, torch.Tensor]:
    batch: dict[str, torch.Tensor] = {}
    for name, values in columns.items():
        if values is not None:
            stacked = as_python_numbers(values, torch.get_default_dtype())
            batch[_name_in_batch(name)] = _as_labels(stacked) if name in _LABELS else stacked
    return batch


@also_of_columns(_batch_of_columns)
def default_data_collator(features: Sequence[Any]) -> dict[str, torch.Tensor]:
    """A batch as a dict of tensors, with one row per feature.

    "label" becomes ``labels``, as int64 for integers and float32 otherwise. So do lists in "label_ids", while tensors
    there keep their dtype. Other columns keep their names. None and strings are left out.

    Args:
        features: dicts, or objects with attributes, all with the same names.

    Raises:
        DataError: if there are no features, their names differ, or values cannot be stacked.
    """
    rows = [_columns_of(feature) for feature in features]
    if not rows:
        raise DataError("There are no rows to make a batch of. Check the sampler and the dataset.")
    other = next((row for row in rows if row.keys() != rows[0].keys()), None)
    if other is not None:
        raise DataError(
            f"Rows of a batch have different columns: {', '.join(map(repr, rows[0]))} and "
            f"{', '.join(map(repr, other)) or 'none at all'}. Give all rows the same columns, or pass a "
            "`data_collator` that can fill the gap."
        )
    batch: dict[str, torch.Tensor] = {}
    for name in rows[0]:
        values = [row[name] for row in rows]
        if any(value is not None and not isinstance(value, str) for value in values):
            batch[_name_in_batch(name)] = _stacked(name, values)
    return batch


def _name_in_batch(name: str) -> str:
    return "labels" if name in _LABELS else name


def _as_labels(stacked: torch.Tensor) -> torch.Tensor:
    return stacked.to(torch.float32 if stacked.is_floating_point() else torch.int64)


def _columns_of(feature: Any) -> Mapping[str, Any]:
    columns: Mapping[str, Any] | None = feature if isinstance(feature, Mapping) else getattr(feature, "__dict__", None)
    if columns is None:
        raise DataError(
            f"A row is a {type(feature).__name__}, but the model gets its inputs by name. Make rows dicts, with the "
            "names of the parameters of its forward, or pass a `data_collator` that makes a dict of several rows."
        )
    return columns


def _stacked(name: str, values: list[Any]) -> torch.Tensor:
    first = values[0]
    try:
        if isinstance(first, torch.Tensor):
            stacked = torch.stack(values)
        elif isinstance(first, (np.ndarray, np.generic)):
            stacked = torch.from_numpy(np.stack(values))
        else:
            stacked = torch.tensor(values)
    except (RuntimeError, TypeError, ValueError) as error:
        raise DataError(
            f"The values of {name!r} cannot be stacked to a batch ({error}). {_stacking_advice(values)}"
        ) from error
    if name == "label" or (name == "label_ids" and not isinstance(first, torch.Tensor)):
        return _as_labels(stacked)
    return stacked


def _stacking_advice(values: list[Any]) -> str:
    if any(value is None for value in values):
        missing = sum(value is None for value in values)
        return f"{missing} of these {len(values)} rows have None there: give them a value, or leave them out."
    large = [value for value in values if isinstance(value, int) and not -(2**63) <= value < 2**63]
    if large:
        return f"{large[0]} is beyond what 64 bits can hold. If these are identifiers, number them from 0."
    return (
        "Give them one length and type first, or pass a `data_collator` that pads, such as "
        "`transformers.DataCollatorWithPadding(tokenizer)`."
    )


def find_label_names(model: Any) -> list[str]:
    """The parameters of the model's forward whose names say that they are labels."""
    labels = _SPAN_LABELS if _SPAN_TASK in type(inner_model(model)).__name__ else ()
    return [name for name in _parameters_of_forward(model) if "label" in name or name in labels]


def signature_columns(model: Any, label_names: Iterable[str]) -> list[str]:
    """The columns for the model: the parameters of its forward, and the names of labels."""
    return list(dict.fromkeys([*_parameters_of_forward(model), "label", "label_ids", *label_names]))


def _parameters_of_forward(model: Any) -> list[str]:
    parameters = inspect.signature(inner_model(model).forward).parameters.values()
    any_names = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [parameter.name for parameter in parameters if parameter.kind not in any_names]


def inner_model(model: Any) -> Any:
    """The model inside a PEFT wrapper, whose own forward accepts anything."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def refuse_no_inputs(batch: Any, model: Any) -> None:
    """Raise a DataError if there is nothing in a batch for the model."""
    if batch is None:
        raise DataError("A batch is None. Return one, a dict of tensors, from the `data_collator`.")
    if not len(batch):
        raise DataError(
            "A batch is empty, so the model gets no input. Check the columns of the dataset and what the "
            f"`data_collator` makes of them; the model takes {', '.join(signature_columns(model, ()))}."
        )


def without_unused_columns(dataset: Any, columns: Sequence[str]) -> Any:
    """`dataset` with only these columns, if it is one of `datasets`; others are returned unchanged."""
    if getattr(dataset, "column_names", None) is None or not hasattr(dataset, "remove_columns"):
        return dataset
    unused = [name for name in dataset.column_names if name not in columns]
    _refuse_nothing_left(dataset.column_names, unused, columns)
    if not unused:
        return dataset
    used, form = dataset.remove_columns(unused), getattr(dataset, "format", {})
    if form.get("type") != "custom":
        return used
    transform = _TransformWithout(unused, form["format_kwargs"]["transform"])
    return used.with_transform(transform, columns=used.format["columns"], output_all_columns=form["output_all_columns"])


class _TransformWithout:
    """The transform of a dataset whose columns were removed, with a clear error if it needs one of them."""

    def __init__(self, unused: list[str], transform: Callable[[Any], Any]) -> None:
        self._unused, self._transform = unused, transform

    def __call__(self, batch: Any) -> Any:
        try:
            return self._transform(batch)
        except KeyError as error:
            if not error.args or error.args[0] not in self._unused:
                raise
            raise DataError(
                f"The transform of the dataset looks for {error.args[0]!r}, but columns that the model's forward does "
                "not name are taken out before it is called. Set remove_unused_columns=False."
            ) from error


def columns_of(dataset: Any) -> list[str]:
    """The columns of a dataset, as it declares them or as its first row has them; none if they are unknown."""
    if (names := getattr(dataset, "column_names", None)) is not None:
        return list(names)
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
        return []  # reading a stream would consume a row
    row = dataset[0]
    return list(row) if isinstance(row, Mapping) else []


class RemoveColumnsCollator(CollatesColumns):
    """Removes all but these columns from rows that are dicts, before another collator."""

    def __init__(self, data_collator: Callable[[list[Any]], Any], columns: Sequence[str]) -> None:
        self.data_collator = data_collator
        self.columns = columns

    def __call__(self, features: list[Any]) -> Any:
        """The batch."""
        columns = frozenset(self.columns)
        return self.data_collator(
            [
                # Most rows have nothing to remove, and a copy takes a third of the time. It is one in any case, because
                # collators remove labels from the rows that they are given.
                feature.copy()
                if type(feature) is dict and feature and feature.keys() <= columns
                else self._without_unused(feature, columns)
                for feature in features
            ]
        )

    def of_columns(self) -> OfColumns | None:
        """See `CollatesColumns`."""
        inner = find_of_columns(self.data_collator)
        is_overridden = type(self).__call__ is not RemoveColumnsCollator.__call__
        if inner is None or is_overridden:
            return None
        return functools.partial(_batch_of_used_columns, inner, frozenset(self.columns))

    def _without_unused(self, feature: Any, columns: Collection[str]) -> Any:
        if not isinstance(feature, (dict, Mapping)):
            return feature
        used = {name: value for name, value in feature.items() if name in columns}
        if not used:
            _refuse_nothing_left(list(feature), list(feature), self.columns)
        return used


def _batch_of_used_columns(
    of_columns: OfColumns, used: Collection[str], columns: Columns
) -> dict[str, torch.Tensor] | None:
    left = {name: values for name, values in columns.items() if name in used}
    return of_columns(left) if left else None  # the error is that of rows


def _refuse_nothing_left(present: list[str], unused: list[str], columns: Sequence[str]) -> None:
    if len(unused) == len(present):
        raise DataError(
            f"The dataset has the columns {', '.join(map(repr, present)) or '(none)'}, none of which the model's "
            f"forward takes: {', '.join(map(repr, columns))}. Rename them, or set remove_unused_columns=False if your "
            "`data_collator` makes other names of them."
        )
