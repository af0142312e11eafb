"""Rows of all ranks in one tensor: what the ranks must agree on first, and how the rows travel."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pytorch_accelerated.errors import ArgumentTypeError
from pytorch_accelerated.trees import map_leaves

_DTYPES = sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str)


def map_tensors(function: Callable[[torch.Tensor], Any], data: Any) -> Any:
    """Apply `function` to every tensor of nested tuples, lists and dicts.

    Raises:
        ArgumentTypeError: if there is anything but tensors in them.
    """

    def apply(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return function(leaf)
        raise ArgumentTypeError(
            f"A {type(leaf).__name__} is among the data to gather. Convert it to a tensor or leave it out."
        )

    return map_leaves(apply, data)


def as_rows(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor without its gradient; a 0-dim tensor as one row."""
    return tensor.detach()[None] if tensor.ndim == 0 else tensor.detach()


def without_rows(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor like `tensor`, but without any rows."""
    return tensor.new_empty((0, *tensor.shape[1:]))


def facts_of(rows: torch.Tensor, structure: str) -> list[int]:
    """What the other ranks must know of `rows` before they can be gathered: a message for `RowsOfRanks.agreed`."""
    return [zlib.crc32(structure.encode()), rows.ndim, _DTYPES.index(rows.dtype), *rows.shape]


@dataclass(frozen=True)
class RowsOfRanks:
    """The layout of one tensor on all ranks.

    Attributes:
        counts: rows by rank.
        row_shape: of the largest row in each dimension.
        dtype: of all rows.
    """

    counts: list[int]
    row_shape: list[int]
    dtype: torch.dtype

    @classmethod
    def agreed(cls, facts: Sequence[Sequence[int]], padding_value: float | None) -> RowsOfRanks:
        """The layout that fits all ranks.

        Args:
            facts: `facts_of` the rows of every rank, by rank.
            padding_value: see `Ranks.gather`.

        Raises:
            ArgumentTypeError: if shapes or dtypes differ between ranks.
        """
        counts = [count for _, _, _, count, *_ in facts]
        # A rank without rows often can't know what its rows would look like.
        telling = [theirs for theirs, count in zip(facts, counts, strict=True) if count] or facts[:1]
        if len({(ndim, dtype) for _, ndim, dtype, *_ in telling}) > 1:
            found = ", ".join(f"{ndim}-dim {_DTYPES[dtype]}" for _, ndim, dtype, *_ in facts)
            raise ArgumentTypeError(
                f"Tensors to gather must be of one kind on every rank, but they are (by rank) {found}. Convert them."
            )
        row_shapes = [list(shape) for _, _, _, _, *shape in telling]
        widest = [max(sizes) for sizes in zip(*row_shapes, strict=True)]
        if padding_value is None and any(shape != widest for shape in row_shapes):
            raise ArgumentTypeError(
                f"Rows of shapes {', '.join(map(str, row_shapes))} (by rank) cannot be joined. Pass `padding_value`."
            )
        return cls(counts, widest, _DTYPES[telling[0][2]])

    def padded(self, rows: torch.Tensor, padding_value: float | None, device: torch.device) -> torch.Tensor:
        """The rows of this rank on `device`, in the shape that every rank sends."""
        padded = torch.full((max(self.counts), *self.row_shape), padding_value or 0, dtype=self.dtype, device=device)
        if len(rows):
            padded[tuple(slice(size) for size in rows.shape)] = rows
        return padded

    def joined(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """The rows of all ranks from the octets of what each has sent."""
        row_length = len(parts[0]) // max(1, *self.counts)
        octets = torch.cat([part[: count * row_length] for part, count in zip(parts, self.counts, strict=True)])
        return octets.view(self.dtype).view(sum(self.counts), *self.row_shape)


def octets_of(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of `tensor` in one dimension: no backend moves every dtype. A view if the tensor is contiguous."""
    return tensor.detach().contiguous().flatten().view(torch.uint8)


def without_repeats(tensor: torch.Tensor) -> torch.Tensor:
    """The part of an expanded tensor that is in memory, so that nothing is written twice."""
    for dimension, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.shape[dimension] > 1:
            tensor = tensor.narrow(dimension, 0, 1)
    return tensor
