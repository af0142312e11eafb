"""Predictions in host memory: each rank keeps its rows until the pass is over, then all exchange them."""

from __future__ import annotations

import collections
from typing import Any

import torch

from pytorch_accelerated.prediction.blocks import BLOCK_BYTES, block_sizes, empty_rows, rows_per_block
from pytorch_accelerated.prediction.joining import exchange_blocks, put_in_order
from pytorch_accelerated.prediction.nested import Leaves, filled
from pytorch_accelerated.prediction.pieces import pieces_in_order
from pytorch_accelerated.prediction.rows import HOOK, CollectedRows, agreed
from pytorch_accelerated.processes.ranks import Ranks


class InMemoryPredictions:
    """Predictions kept in host memory: `finish` returns the predictions of all ranks, as nested tensors on the CPU.

    The structure is that of the first batch; mappings become dicts. A rank without any batch gets named tuples with
    the same fields but a class of their own. Without any row on any rank the result is ``torch.empty(0)``. Memory on
    each rank: the result, this rank's share of it, and a few blocks.

    Args:
        ranks: the processes.
        block_bytes: size of the blocks in which rows are kept, all ranks' together.
        source: what the rows come from, for error messages.
    """

    def __init__(self, ranks: Ranks, *, block_bytes: int = BLOCK_BYTES, source: str = HOOK) -> None:
        self._ranks = ranks
        self._source = source
        self._block_bytes = block_bytes // ranks.count
        self._blocks: dict[str, collections.deque[torch.Tensor]] = collections.defaultdict(collections.deque)
        self._rows = CollectedRows(self._keep, block_bytes=self._block_bytes, source=source)

    def add(self, start: int, predictions: Any) -> None:
        self._rows.add(start, predictions)

    def finish(self) -> Any:
        self._rows.finish()
        everyones = self._ranks.exchange(self._rows.facts())
        kinds, structure = agreed(everyones, source=self._source)
        size = rows_per_block(kinds, self._block_bytes)
        pieces = pieces_in_order([facts.batches for facts in everyones], size)
        counts = [sum(rows for _, rows in facts.batches) for facts in everyones]
        result = empty_rows(kinds, sum(counts))
        for path, (dtype, shape) in kinds.items():
            blocks = [[(dtype, (rows, *shape)) for rows in block_sizes(count, size)] for count in counts]
            put_in_order(result[path], pieces, exchange_blocks(self._ranks, self._blocks[path], blocks))
        return filled(self._rows.structure or structure, result)

    def abort(self) -> None:
        self._blocks.clear()

    def _keep(self, block: Leaves) -> None:
        for path, rows in block.items():
            self._blocks[path].append(rows)
