"""Joins the blocks of all ranks in dataset order."""

from __future__ import annotations

import collections
import math
from collections.abc import Iterable, Iterator, Sequence

import torch

from pytorch_accelerated.compat.torch import copy_all
from pytorch_accelerated.prediction.pieces import Piece
from pytorch_accelerated.processes.gathering import octets_of
from pytorch_accelerated.processes.ranks import Ranks

EXCHANGE_BYTES = 64 * 2**20

Kind = tuple[torch.dtype, tuple[int, ...]]  # dtype and shape of a block
Place = tuple[int, int]  # rank, and number of the block there


def exchange_blocks(
    ranks: Ranks, own: collections.deque[torch.Tensor], kinds: Sequence[Sequence[Kind]]
) -> Iterator[dict[Place, torch.Tensor]]:
    """Yield the blocks of all ranks, a few at a time. Must be called by all ranks.

    Args:
        ranks: the processes.
        own: blocks of this rank. They are removed from here one by one, so that no rows stay in memory twice.
        kinds: of the blocks of each rank, by rank.
    """
    longest = max(map(len, kinds))
    first = 0
    while first < longest:
        last, sizes, size_bytes = first, dict[Place, int](), 0
        while last < longest and size_bytes < EXCHANGE_BYTES:
            for rank, theirs in enumerate(kinds):
                if last < len(theirs):
                    dtype, shape = theirs[last]
                    sizes[rank, last] = dtype.itemsize * math.prod(shape)
                    size_bytes += sizes[rank, last]
            last += 1
        blocks = [own.popleft() for _ in range(min(last - first, len(own)))]
        if ranks.count == 1:
            yield {(0, first + index): block for index, block in enumerate(blocks)}
        else:  # bytes travel, because not every dtype can
            octets = ranks.gather(torch.cat([torch.empty(0, dtype=torch.uint8), *map(octets_of, blocks)]))
            places = sorted(sizes)
            parts = torch.split(octets, [sizes[place] for place in places])
            yield {
                place: _restored(part, *kinds[place[0]][place[1]]) for place, part in zip(places, parts, strict=True)
            }
        first = last


@torch.no_grad()
def put_in_order(
    result: torch.Tensor,
    pieces: Sequence[Piece],
    groups: Iterable[dict[Place, torch.Tensor]],
    padding: torch.Tensor | None = None,
) -> None:
    """Copy the `pieces` of blocks into `result`, one after the other. `padding` fills up shorter rows."""
    places: dict[Place, list[tuple[torch.Tensor, Piece]]] = collections.defaultdict(list)
    for rows, piece in zip(torch.split(result, [piece.rows for piece in pieces]), pieces, strict=True):
        places[piece.rank, piece.block].append((rows, piece))
    for group in groups:
        targets, sources = [], []
        for place, block in group.items():
            for rows, piece in places[place]:
                source = block if piece.rows == block.shape[0] else block.narrow(0, piece.first, piece.rows)
                if rows.shape != source.shape and padding is not None:
                    rows.copy_(padding)
                    inner = (slice(None), *map(slice, source.shape[1:]))
                    rows = rows[inner]
                targets.append(rows)
                sources.append(source)
        copy_all(targets, sources)


def _restored(octets: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    is_aligned = octets.storage_offset() % dtype.itemsize == 0
    return (octets if is_aligned else octets.clone()).view(dtype).view(shape)
