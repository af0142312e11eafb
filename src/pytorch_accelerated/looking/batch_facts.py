"""What a batch looks like: shapes, types and ranges."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from pytorch_accelerated.progress.screen import aligned
from pytorch_accelerated.tracking.loss import widest_float
from pytorch_accelerated.trees import leaves_by_path

_LONGEST_TEXT = 40  # characters of an entry that is not a tensor


class EntryFacts(NamedTuple):
    """One tensor or other value of a batch.

    Attributes:
        name: its place in the batch, such as ``[0]`` or ``['labels']``; empty if the batch is a single tensor.
        shape: the shape of a tensor, else None.
        kind: the dtype of a tensor, else the name of the class.
        value: the range of a tensor, or the value, as text.
        missing: the share of a tensor's entries that are NaN.
    """

    name: str
    shape: tuple[int, ...] | None
    kind: str
    value: str
    missing: float

    @property
    def cells(self) -> tuple[str, str, str, str]:
        """Name, type, shape, and values with the share of NaN, as texts."""
        missing = f" ({self.missing:.1%} NaN)" if self.missing else ""
        return self.name or "batch", self.kind, shape_in_words(self.shape), self.value + missing


class BatchFacts(NamedTuple):
    """What the first batch of this rank looks like.

    Attributes:
        entries: its tensors and other values.
    """

    entries: tuple[EntryFacts, ...]

    def __repr__(self) -> str:
        return "\n".join(aligned([entry.cells for entry in self.entries]))


def facts_of(batch: Any) -> BatchFacts:
    """The facts of a batch. Waits for the device."""
    return BatchFacts(tuple(_facts(path, leaf) for path, leaf in leaves_by_path(batch).items()))


def _facts(name: str, value: Any) -> EntryFacts:
    if not isinstance(value, torch.Tensor):
        text = repr(value)
        return EntryFacts(name, None, type(value).__name__, text[:_LONGEST_TEXT] + "…" * (len(text) > _LONGEST_TEXT), 0)
    kind = str(value.dtype).removeprefix("torch.")
    shape = tuple(value.shape)
    if value.numel() == 0 or value.is_complex():
        return EntryFacts(name, shape, kind, "", 0)
    wide = widest_float(value.device) if value.is_floating_point() else torch.int64
    numbers = value.detach().to(wide)
    is_missing = torch.isnan(numbers)
    known = numbers[~is_missing]
    return EntryFacts(name, shape, kind, _range(known), is_missing.float().mean().item())


def _range(numbers: torch.Tensor) -> str:
    if numbers.numel() == 0:
        return ""
    if not numbers.is_floating_point():
        return f"{numbers.min().item()} to {numbers.max().item()}"
    text = f"{numbers.min().item():.4g} to {numbers.max().item():.4g}"
    mean = numbers.mean().item()
    return f"{text}, mean {mean:.4g}" if math.isfinite(mean) else text


def shape_in_words(shape: tuple[int, ...] | None) -> str:
    """For example "8 x 3"; empty if there is none."""
    return "" if shape is None else " x ".join(map(str, shape)) or "one number"
