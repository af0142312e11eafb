"""Rows of batches: brought to host memory, kept in blocks, and put in dataset order over all ranks."""

from __future__ import annotations

import collections
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from pytorch_accelerated.processes.ranks import Ranks
from pytorch_accelerated.trees import parts_of, rebuilt

BLOCK_BYTES = 64 * 2**20
ROOT = "predictions"

# By the path of the tensor, for example "predictions['boxes'][0]".
Leaves = dict[str, torch.Tensor]
# By the path of the tensor: its dtype, and the shape of one row.
Kinds = dict[str, tuple[torch.dtype, tuple[int, ...]]]


class Place(NamedTuple):
    """Where a rank has the rows of a batch, whose first one has the position `start` in the whole pass."""

    start: int
    block: int
    first: int
    rows: int


class Piece(NamedTuple):
    """Neighbouring rows of the result: `rows` rows of block `block` of rank `rank`, beginning with row `first`."""

    rank: int
    block: int
    first: int
    rows: int


class RowBlocks:
    """Copies rows to host memory, and hands them on in blocks of several batches. A batch is never divided.

    Copies off a CUDA device run while the device computes. The host waits for them when the next batch has come, whose
    work is then queued on the device already.

    Args:
        keep: called with each block. It has memory of its own.
        block_bytes: size of a block, unless a batch is larger.
        padding: fills up dimension 1 where batches differ in it.

    Attributes:
        places: of all batches.
    """

    def __init__(self, keep: Callable[[Leaves], None], block_bytes: int = BLOCK_BYTES, padding: float = 0) -> None:
        self.places: list[Place] = []
        self._keep = keep
        self._block_bytes = block_bytes
        self._padding = padding
        self._arriving: tuple[int, Leaves] | None = None
        self._arrivals: list[torch.cuda.Event] = []
        self._block: Leaves = {}
        self._filled = self._capacity = self._blocks = 0

    def add(self, start: int, leaves: Leaves) -> None:
        """Take the rows of one batch, which may be changed afterwards."""
        devices = {leaf.device for leaf in leaves.values() if leaf.is_cuda}
        if not devices:
            self._put(start, leaves)
            return
        copies = {path: leaf.detach().to("cpu", non_blocking=leaf.is_cuda, copy=True) for path, leaf in leaves.items()}
        arrivals = [torch.cuda.current_stream(device).record_event() for device in devices]
        self._put_arrived()
        self._arriving, self._arrivals = (start, copies), arrivals

    def finish(self) -> None:
        """Hand on the last block, unless it is empty."""
        self._put_arrived()
        self._hand_on()

    def _put_arrived(self) -> None:
        for arrival in self._arrivals:
            arrival.synchronize()
        arrived, self._arriving, self._arrivals = self._arriving, None, []
        if arrived is not None:
            self._put(*arrived)

    @torch.no_grad()
    def _put(self, start: int, leaves: Leaves) -> None:
        if not number_of_rows(leaves):
            return
        end = self._filled + number_of_rows(leaves)
        if end > self._capacity or not all(_fits(leaf, self._block[path]) for path, leaf in leaves.items()):
            self._hand_on()
            self._begin_block(leaves)
            end = number_of_rows(leaves)
        for path, leaf in leaves.items():
            rows = self._block[path][self._filled : end]
            if rows.shape != leaf.shape:
                rows.fill_(self._padding)
            rows[tuple(map(slice, leaf.shape))] = leaf
        self.places.append(Place(start, self._blocks, self._filled, end - self._filled))
        self._filled = end
        if end == self._capacity:
            self._hand_on()

    def _begin_block(self, leaves: Leaves) -> None:
        """Make room for at least these rows."""
        kinds: Kinds = {}
        for path, leaf in leaves.items():
            widest = max(leaf.shape[1:2], self._block[path].shape[1:2] if self._block else ())
            kinds[path] = leaf.dtype, (*widest, *leaf.shape[2:])
        row_bytes = sum(dtype.itemsize * math.prod(shape) for dtype, shape in kinds.values())
        self._capacity = max(number_of_rows(leaves), self._block_bytes // max(1, row_bytes))
        self._block = empty_rows(kinds, self._capacity)

    def _hand_on(self) -> None:
        if self._filled:
            self._blocks += 1
            self._keep({path: rows[: self._filled] for path, rows in self._block.items()})
            self._filled = self._capacity = 0


def _fits(rows: torch.Tensor, block: torch.Tensor) -> bool:
    return rows.dtype == block.dtype and rows.shape[1:2] <= block.shape[1:2]


def pieces_in_order(places: Sequence[Sequence[Place]]) -> list[Piece]:
    """The pieces that make up the result, in order, from the places of each rank's batches.

    >>> pieces_in_order([[Place(0, 0, 0, 2), Place(2, 0, 2, 1)], [Place(3, 0, 0, 1)]])
    [Piece(rank=0, block=0, first=0, rows=3), Piece(rank=1, block=0, first=0, rows=1)]
    """
    pieces: list[Piece] = []
    batches = [(place.start, rank, place) for rank, own in enumerate(places) for place in own]
    for _, rank, (_, block, first, rows) in sorted(batches):
        if pieces and pieces[-1] == (rank, block, first - pieces[-1].rows, pieces[-1].rows):
            pieces[-1] = pieces[-1]._replace(rows=pieces[-1].rows + rows)
        else:
            pieces.append(Piece(rank, block, first, rows))
    return pieces


@torch.no_grad()
def put_in_order(
    ranks: Ranks,
    blocks: collections.deque[torch.Tensor],
    places: Sequence[Sequence[Place]],
    result: torch.Tensor,
    padding: float | None = None,
) -> None:
    """Copy the rows of all ranks into `result`. Must be called by all ranks.

    Args:
        ranks: the processes.
        blocks: of this rank. They are removed from here one by one, so that no rows stay in memory twice.
        places: of each rank's batches.
        result: has as many rows as there are.
        padding: fills up dimension 1 where ranks differ in it.
    """
    pieces = pieces_in_order(places)
    targets = collections.defaultdict[int, list[tuple[Piece, torch.Tensor]]](list)
    for piece, rows in zip(pieces, torch.split(result, [piece.rows for piece in pieces]), strict=True):
        targets[piece.block].append((piece, rows))
    sizes = collections.Counter[tuple[int, int]]()
    for rank, own in enumerate(places):
        for place in own:
            sizes[rank, place.block] += place.rows
    for block in range(1 + max((block for _, block in sizes), default=-1)):
        mine = blocks.popleft() if blocks else result[:0]
        everyones = ranks.gather(mine.to(result.dtype), padding)
        begins = [0, *itertools.accumulate(sizes[rank, block] for rank in range(ranks.count))]
        for piece, rows in targets[block]:
            source = everyones.narrow(0, begins[piece.rank] + piece.first, piece.rows)
            if rows.shape != source.shape:
                rows.fill_(padding or 0)
            rows[tuple(map(slice, source.shape))] = source


def without_classes(structure: Any) -> Any:
    """A structure of plain containers, with an ordered dict of its fields in place of each named tuple."""
    parts = parts_of(structure)
    if parts is None:
        return structure
    plain = [without_classes(part) for part in parts]
    if isinstance(structure, dict):
        return dict(zip(structure, plain, strict=True))
    if hasattr(structure, "_fields"):
        return collections.OrderedDict(zip(structure._fields, plain, strict=True))
    return tuple(plain) if isinstance(structure, tuple) else plain


def filled(structure: Any, leaves: dict[str, Any]) -> Any:
    """A structure, with classes or without, with the leaf in place of each path."""
    parts = parts_of(structure)
    if parts is None:
        return leaves[structure]
    found = [filled(part, leaves) for part in parts]
    if isinstance(structure, collections.OrderedDict):
        return collections.namedtuple("Predictions", structure)(*found)
    return rebuilt(structure, found)


def empty_rows(kinds: Kinds, rows: int) -> Leaves:
    """Memory for rows of these kinds."""
    with torch.inference_mode(False):
        return {path: torch.empty((rows, *shape), dtype=dtype, device="cpu") for path, (dtype, shape) in kinds.items()}


def number_of_rows(leaves: Leaves) -> int:
    """The rows of each of `leaves`."""
    return len(next(iter(leaves.values())))
