"""Joins rows to blocks of bounded size in host memory."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from pytorch_accelerated.prediction.nested import Leaves

BLOCK_BYTES = 64 * 2**20

# By the path of the tensor: its dtype, and the shape of one row.
Kinds = dict[str, tuple[torch.dtype, tuple[int, ...]]]


class Blocks:
    """Joins rows to blocks of `block_bytes`. Every block has memory of its own."""

    def __init__(self, kinds: Kinds, block_bytes: int) -> None:
        self._kinds = kinds
        self._rows_per_block = rows_per_block(kinds, block_bytes)
        self._block = empty_rows(kinds, 0)
        self._filled = 0

    def put(self, leaves: Leaves) -> Iterator[Leaves]:
        """Append a copy of `leaves`, and yield the blocks that are full then."""
        done, rows = 0, number_of_rows(leaves)
        while done < rows:
            if self._filled == 0:
                self._block = empty_rows(self._kinds, self._rows_per_block)
            size = min(rows - done, self._rows_per_block - self._filled)
            for path, leaf in leaves.items():
                self._block[path][self._filled : self._filled + size] = leaf[done : done + size]
            done += size
            self._filled += size
            if self._filled == self._rows_per_block:
                self._filled = 0
                yield self._block

    def rest(self) -> Iterator[Leaves]:
        """Yield the last block, unless it is empty. It owns no more memory than its rows need."""
        if self._filled:
            yield {path: leaf[: self._filled].clone() for path, leaf in self._block.items()}


def empty_rows(kinds: Kinds, rows: int) -> Leaves:
    # A pass may run in inference mode, but users may need gradients of what they compute from the result.
    with torch.inference_mode(False):
        return {path: torch.empty((rows, *shape), dtype=dtype, device="cpu") for path, (dtype, shape) in kinds.items()}


def number_of_rows(leaves: Leaves) -> int:
    return len(next(iter(leaves.values())))


def block_sizes(rows: int, rows_per_block: int) -> list[int]:
    """The rows of each block that `rows` fill."""
    full, rest = divmod(rows, rows_per_block)
    return [rows_per_block] * full + [rest] * bool(rest)


def rows_per_block(kinds: Kinds, block_bytes: int) -> int:
    row_bytes = sum(dtype.itemsize * math.prod(shape) for dtype, shape in kinds.values())
    return max(1, block_bytes // max(1, row_bytes))
