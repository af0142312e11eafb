"""Iterators and other iterables that yield batches: said aloud, because they may have been meant to yield samples."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from pytorch_accelerated.data.batch_size import batch_size_of


def look_at_first_batch(batches: Any) -> tuple[Iterable[Any], str | None]:
    """What yields the same batches, and a line that says what they are taken for; None if nobody could doubt it.

    Only iterators of Python itself, generators for instance, are asked for their first batch. A pass over anything else
    may begin anew, and do more than yield.
    """
    if isinstance(batches, (DataLoader, list, tuple)):
        return batches, None
    line = f"The {type(batches).__name__} is taken for ready batches, not for samples to make batches of"
    if not is_used_up_by_one_pass(batches):
        return batches, line
    for first in batches:
        size = batch_size_of(first)
        if _looks_like_a_sample(first):
            shapes = ", ".join(str(list(getattr(part, "shape", ()))) for part in first[:2])
            warnings.warn(
                f"{line}, but its first batch looks like one sample: the shapes of inputs and targets are {shapes}. "
                "Inputs and targets of a batch have one row per sample each. Pass a list, a map-style dataset or an "
                "IterableDataset to have samples put together to batches.",
                stacklevel=2,
            )
        shown = f"a {type(first).__name__} whose size nobody can tell" if size is None else f"of size {size}"
        return itertools.chain([first], batches), f"{line}. The first is {shown}."
    return batches, line


def is_used_up_by_one_pass(batches: Any) -> bool:
    """Whether this is an iterator, other than one whose `__iter__` begins anew."""
    return isinstance(batches, Iterator) and type(batches).__module__ in ("builtins", "itertools")


def _looks_like_a_sample(batch: Any) -> bool:
    """Whether inputs with rows have one target."""
    if not isinstance(batch, (tuple, list)) or len(batch) < 2:
        return False
    inputs, targets = batch[:2]
    has_rows = bool(getattr(inputs, "shape", ()))
    return has_rows and (
        isinstance(targets, (int, float))
        or (isinstance(targets, (torch.Tensor, np.ndarray, np.generic)) and not targets.ndim)
    )
