"""Finds the rows of the result in the blocks of all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Piece(NamedTuple):
    """Neighbouring rows of the result: `rows` rows of block `block` of rank `rank`, beginning with row `first`."""

    rank: int
    block: int
    first: int
    rows: int


def pieces_in_order(batches: Sequence[Sequence[tuple[int, int]]], rows_per_block: int) -> list[Piece]:
    """The pieces that make up the result, in order.

    Args:
        batches: start and number of rows of each rank's batches, in the order in which the rank added them.
        rows_per_block: number of rows in each block, apart from a rank's last block.

    >>> pieces_in_order([[(0, 3), (5, 1)], [(3, 2)]], rows_per_block=2)  # doctest: +NORMALIZE_WHITESPACE
    [Piece(rank=0, block=0, first=0, rows=2), Piece(rank=0, block=1, first=0, rows=1),
     Piece(rank=1, block=0, first=0, rows=2), Piece(rank=0, block=1, first=1, rows=1)]
    """
    placed = []
    for rank, theirs in enumerate(batches):
        row = 0
        for start, rows in theirs:
            placed.append((start, rank, row, row + rows))
            row += rows
    pieces: list[Piece] = []
    for _, rank, row, end in sorted(placed):
        while row < end:
            block, first = divmod(row, rows_per_block)
            rows = min(end - row, rows_per_block - first)
            if pieces and pieces[-1] == (rank, block, first - pieces[-1].rows, pieces[-1].rows):
                pieces[-1] = pieces[-1]._replace(rows=pieces[-1].rows + rows)
            else:
                pieces.append(Piece(rank, block, first, rows))
            row += rows
    return pieces
