"""Predictions in host memory: each rank keeps its rows until the pass is over, then all exchange them."""

from __future__ import annotations

import collections
import itertools
import math
from collections.abc import Iterable
from typing import Any

import torch

from pytorch_accelerated.prediction.blocks import BLOCK_BYTES, empty_rows, rows_per_block
from pytorch_accelerated.prediction.nested import Leaves, filled
from pytorch_accelerated.prediction.pieces import Piece, pieces_in_order
from pytorch_accelerated.prediction.rows import CollectedRows, agreed
from pytorch_accelerated.processes.ranks import Ranks


class InMemoryPredictions:
    """Predictions kept in host memory: `finish` gives all ranks the predictions of all, as nested tensors on the CPU.

    The structure is that of the first batch; mappings become dicts. Where a rank had no batch at all, named tuples
    come back with the same fields but a class of their own. Without any row on any rank the result is
    ``torch.empty(0)``. Memory on each rank: the result, this rank's share of it, and a few blocks.

    Args:
        ranks: the processes.
        block_bytes: size of the blocks in which rows are kept and exchanged, all ranks' together.
    """

    def __init__(self, ranks: Ranks, *, block_bytes: int = BLOCK_BYTES) -> None:
        self._ranks = ranks
        self._block_bytes = block_bytes // ranks.count
        self._blocks: collections.deque[Leaves] = collections.deque()
        self._rows = CollectedRows(self._blocks.append, block_bytes=self._block_bytes)

    def add(self, start: int, predictions: Any) -> None:
        self._rows.add(start, predictions)

    def finish(self) -> Any:
        self._rows.finish()
        everyones = self._ranks.exchange(self._rows.facts())
        kinds, structure = agreed(everyones)
        pieces = pieces_in_order([facts.batches for facts in everyones], rows_per_block(kinds, self._block_bytes))
        result = empty_rows(kinds, sum(piece.rows for piece in pieces))
        for targets in _targets_by_block(pieces):
            # Blocks are let go one by one, so that the rows are never in memory twice.
            block = self._blocks.popleft() if self._blocks else empty_rows(kinds, 0)
            self._exchange_block(block, targets, result)
        return filled(self._rows.structure or structure, result)

    def abort(self) -> None:
        self._blocks.clear()

    def _exchange_block(self, block: Leaves, targets: list[tuple[int, Piece]], result: Leaves) -> None:
        """Copy one block of each rank to where its rows belong."""
        sizes = [0] * self._ranks.count
        for _, piece in targets:
            sizes[piece.rank] += piece.rows
        begins = list(itertools.accumulate(sizes, initial=0))
        for path, rows in block.items():
            # Bytes travel, because not every dtype can.
            source, target = self._ranks.gather(_octets(rows)), _octets(result[path])
            for position, piece in targets:
                first = begins[piece.rank] + piece.first
                target[position : position + piece.rows] = source[first : first + piece.rows]


def _targets_by_block(pieces: Iterable[Piece]) -> list[list[tuple[int, Piece]]]:
    """For the first block of all ranks, the second, …: its pieces, each with its position in the result."""
    targets: dict[int, list[tuple[int, Piece]]] = collections.defaultdict(list)
    position = 0
    for piece in pieces:
        targets[piece.block].append((position, piece))
        position += piece.rows
    return [targets[block] for block in sorted(targets)]


def _octets(rows: torch.Tensor) -> torch.Tensor:
    """The same memory as uint8, one row for each of `rows`."""
    return rows.reshape(len(rows), math.prod(rows.shape[1:])).view(torch.uint8)
