"""The form in which a history keeps values: numbers as floats, tensors and arrays as copies on the host."""

from __future__ import annotations

import numbers
from typing import Any, NamedTuple

import numpy as np
import torch

from pytorch_accelerated.trees import map_leaves, plain_parts_of


class MetricRecord(NamedTuple):
    """One value of a metric.

    Attributes:
        name: of the metric, with its prefix.
        value: a float for any number, including NaN and infinities; otherwise the recorded object.
        epoch: the epoch in which it was recorded, counted from 1.
        update: the number of optimizer updates since the history was reset.
    """

    name: str
    value: Any
    epoch: int
    update: int

    @property
    def is_scalar(self) -> bool:
        """Whether the value is a number. Tables, plots and logs have only those, and only those can be watched."""
        return is_scalar(self.value)


def stored_value(value: Any) -> Any:
    """A float for a number, a numpy scalar, or a 0-dim array or tensor (which waits for its device).

    Other tensors and arrays, including those in lists, tuples and dicts, are copied to the host, tensors without their
    graph: later changes of a confusion matrix must not change the record. Everything else is returned unchanged.
    """
    if isinstance(value, (torch.Tensor, np.ndarray, np.generic)) and value.ndim == 0:
        scalar = value.item()
        if isinstance(scalar, numbers.Real):
            return float(scalar)
    elif isinstance(value, numbers.Real):
        return float(value)
    return on_host(value)


def is_scalar(value: Any) -> bool:
    """Whether a value from `stored_value` is a number, which can be used in tables, plots and comparisons."""
    return type(value) is float


def on_host(value: Any) -> Any:
    """`value` with its tensors and arrays, including those in lists, tuples and dicts, replaced by host copies."""
    return map_leaves(_copy_on_host, value, parts=plain_parts_of)


def _copy_on_host(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    return value.copy() if isinstance(value, np.ndarray) else value
