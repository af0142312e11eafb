"""What a history keeps of a metric's value: numbers as floats, anything else as it is, but for where tensors are."""

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
        value: a float for a number, NaN and infinities among them; else what was recorded.
        epoch: the epoch in which it was recorded, counted from 1.
        update: the optimizer updates that had been finished since the history was reset.
    """

    name: str
    value: Any
    epoch: int
    update: int

    @property
    def is_scalar(self) -> bool:
        """Whether the value is a number: only those are in tables, plots and logs, and can be watched."""
        return is_scalar(self.value)


def stored_value(value: Any) -> Any:
    """A float for a number, a numpy scalar, or a 0-dim array or tensor, whose device is then waited for.

    Tensors come without their graph and arrays with them, in memory of their own on the host: neither what is added to
    a confusion matrix later nor a full device should change what was recorded. That holds for those in lists, tuples
    and dicts, too. Everything else is returned as it is.
    """
    if isinstance(value, (torch.Tensor, np.ndarray, np.generic)) and value.ndim == 0:
        scalar = value.item()
        if isinstance(scalar, numbers.Real):
            return float(scalar)
    elif isinstance(value, numbers.Real):
        return float(value)
    return on_host(value)


def is_scalar(value: Any) -> bool:
    """Whether `stored_value` has made a number of it, which tables, plots and comparisons can take."""
    return type(value) is float


def on_host(value: Any) -> Any:
    """`value` with host copies in place of its tensors and arrays, also of those in lists, tuples and dicts."""
    return map_leaves(_copy_on_host, value, parts=plain_parts_of)


def _copy_on_host(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    return value.copy() if isinstance(value, np.ndarray) else value
