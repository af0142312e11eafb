"""The number of samples in a batch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch


def batch_size_of(batch: Any) -> int | None:
    """The first dimension of the first tensor or array in `batch`, or None if there is none."""
    if type(batch) in (list, tuple) and batch and isinstance(batch[0], torch.Tensor) and batch[0].ndim:
        return batch[0].shape[0]  # the answer for most batches, without a search
    if isinstance(batch, Mapping):
        parts: Iterable[Any] = batch.values()
    elif isinstance(batch, (tuple, list)):
        parts = batch
    else:
        shape = getattr(batch, "shape", None)
        return int(shape[0]) if shape else None
    return next((size for size in map(batch_size_of, parts) if size is not None), None)
