"""Rows of batches: brought to host memory, kept in blocks, and put in dataset order over all ranks."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from pytorch_accelerated.facts.trees import parts_of, rebuilt
from pytorch_accelerated.ranks.ranks import Ranks

BLOCK_BYTES = 64 * 2**20
_MOST_BATCHES = 4096  # in a block, since each tensor takes some memory besides its rows
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
    """Copies rows to host memory, and hands them on in blocks of many batches. A batch is never divided.

    Copies off a CUDA device run while the device computes. The host waits for them when the next batch has come, whose
    work is then queued on the device already.

    Args:
        keep: called with each block. It has memory of its own.
        block_bytes: size from which on a block is handed on.
        padding: fills up dimension 1 where batches differ in it.

    Attributes:
        places: of all batches.
    """

    def __init__(self, keep: Callable[[Leaves], None], block_bytes: int = BLOCK_BYTES, padding: float = 0) -> None:
        self.places: list[Place] = []
        self._keep = keep
        self._block_bytes = block_bytes
        self._padding = padding
        self._arriving: tuple[int, Leaves, list[torch.cuda.Event]] | None = None
        self._batches: list[Leaves] = []  # of the next block
        self._rows = self._bytes = self._blocks = 0

    def add(self, start: int, leaves: Leaves) -> None:
        """Take the rows of one batch, which may be changed afterwards."""
        copies = {path: leaf.detach().to("cpu", non_blocking=leaf.is_cuda, copy=True) for path, leaf in leaves.items()}
        devices = {leaf.device for leaf in leaves.values() if leaf.is_cuda}
        arrivals = [torch.cuda.current_stream(device).record_event() for device in devices]
        self._put_arrived()
        self._arriving = start, copies, arrivals
        if not arrivals:
            self._put_arrived()

    def finish(self) -> None:
        """Hand on the last block, unless it is empty."""
        self._put_arrived()
        self._hand_on()

    def _put_arrived(self) -> None:
        if self._arriving is None:
            return
        (start, leaves, arrivals), self._arriving = self._arriving, None
        for arrival in arrivals:
            arrival.synchronize()
        rows = len(next(iter(leaves.values())))
        if rows:
            self.places.append(Place(start, self._blocks, self._rows, rows))
            self._batches.append(leaves)
            self._rows += rows
            self._bytes += sum(leaf.nbytes for leaf in leaves.values())
            if self._bytes >= self._block_bytes or len(self._batches) == _MOST_BATCHES:
                self._hand_on()

    def _hand_on(self) -> None:
        if self._batches:
            batches, self._batches, self._rows, self._bytes = self._batches, [], 0, 0
            self._blocks += 1
            self._keep({path: _joined([batch[path] for batch in batches], self._padding) for path in batches[0]})


@torch.no_grad()
def _joined(parts: list[torch.Tensor], padding: float) -> torch.Tensor:
    """The rows of all parts, as wide as the widest of them, in memory of their own."""
    width = max(part.shape[1:2] for part in parts)
    with torch.inference_mode(False):
        wide = [part if part.shape[1:2] == width else _widened(part, width, padding) for part in parts]
        return torch.cat(wide)


def _widened(part: torch.Tensor, width: Sequence[int], padding: float) -> torch.Tensor:
    wide = part.new_full((len(part), *width, *part.shape[2:]), padding)
    wide[:, : part.shape[1]] = part
    return wide


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
        per_rank = ranks.gather(mine.to(result.dtype), padding)
        begins = [0, *itertools.accumulate(sizes[rank, block] for rank in range(ranks.count))]
        for piece, rows in targets[block]:
            source = per_rank.narrow(0, begins[piece.rank] + piece.first, piece.rows)
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
