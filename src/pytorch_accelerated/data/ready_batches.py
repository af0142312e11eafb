"""Announces that an iterable is treated as one of batches, because the user may have meant it as one of samples."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from pytorch_accelerated.trees import count_rows


def look_at_first_batch(batches: Any) -> tuple[Iterable[Any], str | None]:
    """An iterable of the same batches, and a line that announces it; None if there is no doubt.

    The first batch is read only from Python's built-in iterators, such as generators. Starting a pass over another
    object may have side effects, or restart it.
    """
    if isinstance(batches, (DataLoader, list, tuple)):
        return batches, None
    line = f"The {type(batches).__name__} is treated as an iterable of batches, not of samples"
    if not is_used_up_by_one_pass(batches):
        return batches, line
    for first in batches:
        size = count_rows(first)
        if _looks_like_a_sample(first):
            shapes = ", ".join(str(list(getattr(part, "shape", ()))) for part in first[:2])
            warnings.warn(
                f"{line}, but its first batch looks like one sample: the shapes of inputs and targets are {shapes}. "
                "Inputs and targets of a batch have one row per sample each. Pass a list, a map-style dataset or an "
                "IterableDataset to have samples combined into batches.",
                stacklevel=2,
            )
        shown = f"is a {type(first).__name__} of unknown size" if size is None else f"has size {size}"
        return itertools.chain([first], batches), f"{line}. The first batch {shown}."
    return batches, line


def is_used_up_by_one_pass(batches: Any) -> bool:
    """Whether this is an iterator that can't be restarted: some classes of users restart in `__iter__`."""
    return isinstance(batches, Iterator) and type(batches).__module__ in ("builtins", "itertools")


def _looks_like_a_sample(batch: Any) -> bool:
    """Whether the inputs have rows, but there is only one target."""
    if not isinstance(batch, (tuple, list)) or len(batch) < 2:
        return False
    inputs, targets = batch[:2]
    has_rows = bool(getattr(inputs, "shape", ()))
    return has_rows and (
        isinstance(targets, (int, float))
        or (isinstance(targets, (torch.Tensor, np.ndarray, np.generic)) and not targets.ndim)
    )
