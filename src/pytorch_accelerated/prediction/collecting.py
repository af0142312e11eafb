"""The rows of a pass in dataset order, each once, in host memory; `stored` writes them to a folder instead.

Each rank keeps the rows of its own batches as they come. The position of a batch says where its rows belong, so the
ranks need not communicate before the end of the pass.
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch.nn.utils.rnn import PackedSequence, unpack_sequence

from pytorch_accelerated.errors import ArgumentTypeError, DataError, HookOutputError
from pytorch_accelerated.facts.error_notes import described
from pytorch_accelerated.facts.trees import leaves, map_leaves, map_paths, parts_of, rebuilt
from pytorch_accelerated.ranks.ranks import Ranks

HOOK = "`calculate_predict_batch_outputs`"
BLOCK_BYTES = 64 * 2**20
_MOST_BATCHES = 4096  # in a block, since each tensor takes some memory besides its rows
ROOT = "predictions"

# By the path of the tensor, for example "predictions['boxes'][0]".
Leaves = dict[str, torch.Tensor]
# By the path of the tensor: its dtype, and the shape of one row.
Kinds = dict[str, tuple[torch.dtype, tuple[int, ...]]]


class PredictionCollector(Protocol):
    """Collects the predictions of a pass. All ranks must create one and `finish` it."""

    def add(self, start: int, predictions: Any, samples: int | None = None) -> None:
        """Take the predictions of one batch.

        Args:
            start: position of the batch's first sample in the whole pass; batches do not overlap.
            predictions: tensors or numpy arrays with one row per sample, or nested tuples, lists and dicts of them; or
                a list with one result per sample. On any device. They may be changed afterwards.
            samples: in the batch; None if unknown.

        Raises:
            ArgumentTypeError: if they contain anything else.
            DataError: if the tensors differ in their number of rows, or cannot be joined with the earlier ones.
            HookOutputError: if there is another number of rows than of samples.
        """

    def finish(self) -> Any:
        """The predictions of all ranks, in dataset order. Must be called by all ranks.

        Raises:
            DataError: if the predictions of the ranks cannot be joined.
        """

    def abort(self) -> None:
        """Free the rows and delete files. A rank may call it without the others."""


class InMemoryPredictions:
    """Predictions kept in host memory: `finish` returns the predictions of all ranks, on the CPU.

    Rows come as nested tensors with the structure of the first batch; mappings become dicts. A rank without any batch
    gets named tuples with the same fields but a class of their own. Without any row on any rank the result is
    ``torch.empty(0)``. Memory on each rank: the result, this rank's share of it, and a few blocks.

    Results that differ in size come in lists with one per sample, and are returned in one list. A list that also has
    one row per sample in each tensor is read as the other batches are, else as rows. Packed sequences are taken apart.

    Args:
        ranks: the processes.
        block_bytes: size of the blocks in which rows are kept, all ranks' together.
        source: what the rows come from, for error messages.
    """

    def __init__(self, ranks: Ranks, *, block_bytes: int = BLOCK_BYTES, source: str = HOOK) -> None:
        self._ranks = ranks
        self._source = source
        self._blocks: dict[str, collections.deque[torch.Tensor]] = collections.defaultdict(collections.deque)
        self._rows = CollectedRows(self._keep, block_bytes=block_bytes // ranks.count, source=source)
        self._are_rows: bool | None = None  # None as long as all batches can be read in both ways
        self._unclear: list[tuple[int, Any, int | None]] = []
        self._results: list[tuple[int, list[Any]]] = []

    def add(self, start: int, predictions: Any, samples: int | None = None) -> None:
        """See `PredictionCollector`."""
        if isinstance(predictions, PackedSequence):
            predictions = unpack_sequence(predictions)
        if self._are_rows is None:
            self._are_rows = are_rows(predictions, samples)
        if self._are_rows is None:
            self._unclear.append((start, map_leaves(_kept, predictions), samples))
            return
        self._take_unclear()
        self._take(start, predictions, samples)

    def finish(self) -> Any:
        readings = self._ranks.exchange(self._are_rows)
        if True in readings and False in readings:
            raise DataError(
                f"Some ranks have one result per sample, others one row per sample in each tensor (by rank: "
                f"{readings}). Return the same kind of predictions for every batch from {self._source}."
            )
        self._are_rows = False not in readings
        self._take_unclear()
        if not self._are_rows:
            batches = itertools.chain(*self._ranks.exchange(self._results))
            return [result for _, results in sorted(batches, key=lambda batch: batch[0]) for result in results]
        self._rows.finish()
        facts = self._ranks.exchange(self._rows.facts())
        kinds, structure = agreed(facts, source=self._source)
        places = [theirs.places for theirs in facts]
        result = empty_rows(kinds, sum(place.rows for own in places for place in own))
        for path in kinds:
            put_in_order(self._ranks, self._blocks[path], places, result[path])
        return filled(self._rows.structure or structure, result)

    def abort(self) -> None:
        self._blocks.clear()

    def _take_unclear(self) -> None:
        unclear, self._unclear = self._unclear, []
        for batch in unclear:
            self._take(*batch)

    def _take(self, start: int, predictions: Any, samples: int | None) -> None:
        if self._are_rows:
            self._rows.take(start, predictions, samples)
            return
        results = map_leaves(_kept, predictions)
        if not isinstance(results, list) or len(results) != (samples or len(results)):
            raise HookOutputError(
                f"{self._source} returned {described(predictions)} for a batch of {samples} samples, but lists with "
                "one result per sample for those before it. Return such a list for every batch."
            )
        self._results.append((start, results))

    def _keep(self, block: Leaves) -> None:
        for path, rows in block.items():
            self._blocks[path].append(rows)


def are_rows(predictions: Any, samples: int | None) -> bool | None:
    """Whether predictions have a row per sample in each tensor, not a result per sample in a list; None if both.

    `samples` is the number in the batch, None if unknown.
    """
    if type(predictions) is not list or not predictions or len(predictions) != (samples or len(predictions)):
        return True
    if all(isinstance(each, Mapping) for each in predictions):
        return False
    sizes = {leaf.shape[0] if getattr(leaf, "ndim", 0) else None for leaf in leaves(predictions)}
    if len(sizes) > 1 or None in sizes or samples not in (None, *sizes):
        return False
    return None if samples is not None else True


class BatchRows(NamedTuple):
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
        self.places: list[BatchRows] = []
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
            self.places.append(BatchRows(start, self._blocks, self._rows, rows))
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


def pieces_in_order(places: Sequence[Sequence[BatchRows]]) -> list[Piece]:
    """The pieces that make up the result, in order, from the places of each rank's batches.

    >>> pieces_in_order([[BatchRows(0, 0, 0, 2), BatchRows(2, 0, 2, 1)], [BatchRows(3, 0, 0, 1)]])
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
    places: Sequence[Sequence[BatchRows]],
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


class RowFacts(NamedTuple):
    """The facts about a rank's rows that the other ranks need.

    Attributes:
        kinds: of the tensors; empty if the rank had no batch.
        structure: with paths in place of tensors and an ordered dict in place of each named tuple, because classes can
            be neither stored nor sent.
        places: of its batches.
    """

    kinds: Kinds
    structure: Any
    places: list[BatchRows]


class CollectedRows(RowBlocks):
    """Checks that batches of rows fit together, and hands them on in blocks.

    Args:
        keep, block_bytes: see `RowBlocks`.
        source: what the rows come from, for error messages.

    Attributes:
        structure: of the first batch, with paths in place of tensors.
        kinds: of its tensors.
    """

    def __init__(self, keep: Callable[[Leaves], None], *, block_bytes: int, source: str = HOOK) -> None:
        super().__init__(keep, block_bytes)
        self.structure: Any = None
        self.kinds: Kinds = {}
        self._source = source

    def facts(self) -> RowFacts:
        """What the other ranks need to know."""
        return RowFacts(self.kinds, without_classes(self.structure), self.places)

    def take(self, start: int, predictions: Any, samples: int | None = None) -> None:
        """Add the rows of a batch, after checking them. See `PredictionCollector.add`."""
        where = f"The predictions of the batch that begins at row {start}"
        leaves: Leaves = {}
        complaints: list[str] = []

        def store(path: str, leaf: Any) -> str:
            try:
                leaves[path] = _as_tensor(leaf)
            except TypeError as error:
                complaints.append(f"{path} is {error}")
            return path

        structure = map_paths(store, predictions, ROOT)
        if complaints:
            raise ArgumentTypeError(
                f"{where} contain values other than tensors: {'; '.join(complaints)}. Return tensors or arrays with "
                f"one row per sample from {self._source}, or a list with one result per sample."
            )
        sizes = {path: leaf.shape[0] if leaf.ndim else None for path, leaf in leaves.items()}
        rows = next(iter(sizes.values()), None)
        if rows is None or set(sizes.values()) != {rows}:
            found = ", ".join(f"{path} has {'no rows' if size is None else size}" for path, size in sizes.items())
            raise DataError(
                f"{where} must have one row per sample in each tensor, but {found or 'there is no tensor'}. Return "
                f"such rows from {self._source}, without values that belong to the whole batch."
            )
        if rows != (rows if samples is None else samples):
            is_second = all(leaf.shape[1:2] == (samples,) for leaf in leaves.values())
            hint = " Samples seem to be in dimension 1: `outputs.transpose(0, 1)`." if is_second else ""
            raise HookOutputError(
                f"{self._source} returned {rows} rows for a batch of {samples} samples. Return one row per sample, or "
                f"a list with one result per sample if these differ in size.{hint}"
            )
        kinds = {path: (leaf.dtype, tuple(leaf.shape[1:])) for path, leaf in leaves.items()}
        if not self.kinds:
            self.structure, self.kinds = structure, kinds
        elif kinds != self.kinds:
            raise _cannot_be_joined(where, "those before them", kinds, self.kinds, self._source)
        self.add(start, leaves)


def agreed(per_rank: Sequence[RowFacts], *, source: str = HOOK) -> tuple[Kinds, Any]:
    """Kinds and structure of the predictions of all ranks; as for an empty vector if no rank had a batch.

    `source` is what the rows come from, for error messages.

    Raises:
        DataError: if the kinds differ.
    """
    known = [(rank, facts) for rank, facts in enumerate(per_rank) if facts.kinds]
    if not known:
        return {ROOT: (torch.float32, ())}, ROOT
    (first, expected), *further = known
    for rank, facts in further:
        if facts.kinds != expected.kinds:
            where, others = f"The predictions of rank {rank}", f"those of rank {first}"
            raise _cannot_be_joined(where, others, facts.kinds, expected.kinds, source)
    return expected.kinds, expected.structure


def _kept(leaf: Any) -> Any:
    with torch.inference_mode(False):
        return leaf.detach().to("cpu", copy=True) if isinstance(leaf, torch.Tensor) else leaf


def _as_tensor(leaf: Any) -> torch.Tensor:
    """The dense tensor that `leaf` is, or that its values make.

    Raises:
        TypeError: if there is none; the message says what `leaf` is instead.
    """
    if isinstance(leaf, np.ndarray):
        try:
            return torch.from_numpy(np.array(leaf))  # a copy: not every array can be shared with torch
        except (TypeError, ValueError):
            raise TypeError(f"an array of {leaf.dtype}, which torch has no dtype for") from None
    if not isinstance(leaf, torch.Tensor):
        raise TypeError(f"a {type(leaf).__name__} ({leaf!r:.50})" if leaf is not None else "None")
    if leaf.layout is not torch.strided or leaf.is_nested:
        raise TypeError("a sparse or nested tensor, which has no rows of one size")
    return leaf


def _cannot_be_joined(where: str, others: str, found: Kinds, expected: Kinds, source: str) -> DataError:
    def in_words(kind: tuple[torch.dtype, tuple[int, ...]] | None) -> str:
        return "missing" if kind is None else f"{kind[0]} with rows of shape {kind[1]}"

    difference = ", ".join(
        f"{path} is {in_words(found.get(path))} instead of {in_words(expected.get(path))}"
        for path in {**expected, **found}
        if found.get(path) != expected.get(path)
    )
    return DataError(
        f"{where} cannot be joined with {others}: {difference}. Return rows of one shape and dtype from {source}, "
        "padded there if their lengths vary, or a list with one result per sample."
    )
