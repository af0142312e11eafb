"""All predictions of a pass, in dataset order, each once: in memory, or streamed to disk.

Each rank keeps or writes the rows of its own batches as they come, in blocks of bounded size. The positions of the
batches alone say where those rows belong, so the ranks tell each other nothing before the pass is over.

On disk the result is a folder that appears whole or not at all, made by `checkpointing.publish`. It holds

- ``rank00000-00000.safetensors``, …: one block each, tensors named by where they were in what the hook returned;
- ``order.safetensors``: `pieces`, int64 of shape (n, 4), with the fields of `Piece`: put below each other, these rows
  are the result;
- ``manifest.json``: the number of rows, the structure, dtype and row shape of each tensor, and for each of the other
  files its size and SHA-256.
"""

from __future__ import annotations

import collections
import itertools
import math
import os
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from safetensors import safe_open

from pytorch_accelerated.checkpointing.layout import MANIFEST_NAME, PREDICTIONS_FORMAT, FileEntry
from pytorch_accelerated.checkpointing.publish import StagedFolder, begin, explained
from pytorch_accelerated.checkpointing.tensor_file import DTYPE_NAMES, chunks, read_tensors
from pytorch_accelerated.checkpointing.verify import open_verified, read_manifest
from pytorch_accelerated.distributed import Ranks
from pytorch_accelerated.errors import (
    ArgumentTypeError,
    CheckpointError,
    ConfigurationError,
    DataError,
    InvalidCheckpointError,
    PytorchAcceleratedError,
)

BLOCK_BYTES = 64 * 2**20
_FORMAT = 1
_ROOT = "predictions"
_ORDER_NAME = "order.safetensors"

# Both by the path of the tensor, for example "predictions['boxes'][0]".
Leaves = dict[str, torch.Tensor]  # all with the same number of rows
Kinds = dict[str, tuple[torch.dtype, tuple[int, ...]]]  # dtype, and shape of one row


class PredictionCollector(Protocol):
    """What takes the predictions of a pass. All ranks must make one, and `finish` it."""

    def add(self, start: int, predictions: Any) -> None:
        """Take the predictions of one batch.

        A copy off a CUDA device is only started here. It is waited for when the next batch is added, whose work is
        then already queued on the device, so the device never waits for the host.

        Args:
            start: position of the batch's first sample in the order of the whole pass; the ranks' batches do not
                overlap.
            predictions: tensors or numpy arrays, or nested tuples, lists and dicts of them; one row per sample, on
                any device. They may be changed afterwards.

        Raises:
            ArgumentTypeError: if something else is among them.
            DataError: if the tensors differ in their number of rows, or cannot be put below the earlier ones.
        """

    def finish(self) -> Any:
        """The predictions of all ranks, in dataset order. Must be called by all ranks.

        Raises:
            DataError: if those of the ranks cannot be put below each other.
        """

    def abort(self) -> None:
        """Give up: free what was kept, delete what was written. Any rank, without the others."""


def collect_predictions(ranks: Ranks, output_path: str | os.PathLike[str] | None = None) -> PredictionCollector:
    """What takes the predictions of a pass, in memory or, with `output_path`, on disk. Must be called by all ranks."""
    return InMemoryPredictions(ranks) if output_path is None else StoredPredictionsWriter(ranks, output_path)


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
        self._rows = _CollectedRows(self._blocks.append, block_bytes=self._block_bytes)

    def add(self, start: int, predictions: Any) -> None:
        self._rows.add(start, predictions)

    def finish(self) -> Any:
        self._rows.finish()
        everyones = self._ranks.exchange(self._rows.facts())
        kinds, structure = _agreed(everyones)
        pieces = pieces_in_order([facts.batches for facts in everyones], _rows_per_block(kinds, self._block_bytes))
        result = _empty_rows(kinds, sum(piece.rows for piece in pieces))
        for targets in _targets_by_block(pieces):
            # Blocks are let go one by one, so that the rows are never in memory twice.
            block = self._blocks.popleft() if self._blocks else _empty_rows(kinds, 0)
            self._exchange_block(block, targets, result)
        return _filled(self._rows.structure or structure, result)

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


class StoredPredictionsWriter:
    """Predictions streamed to a folder: `finish` gives all ranks a `StoredPredictions`.

    Each rank writes its rows as soon as they fill a block, so memory stays flat. The folder appears when all ranks
    are done; what a killed process leaves has a hidden name beside it, and goes when the next one writes there.

    Args:
        ranks: the processes. All must see the same file system.
        output_path: the folder to make; missing parents are made too.
        block_bytes: size of a block. A row is never divided.

    Raises:
        ConfigurationError: if `output_path` is there already and no empty folder, or some rank cannot see it.
        CheckpointError: if the disk refuses; also from `add` and `finish`.
    """

    def __init__(self, ranks: Ranks, output_path: str | os.PathLike[str], *, block_bytes: int = BLOCK_BYTES) -> None:
        self._ranks = ranks
        self._block_bytes = block_bytes
        self._files: list[FileEntry] = []
        self._rows = _CollectedRows(self._write_block, block_bytes=block_bytes, storable=DTYPE_NAMES)
        self._staged = ranks.do_on_first(lambda: _begin(output_path))
        blind = [rank for rank, sees in enumerate(ranks.exchange(self._staged.staging.is_dir())) if not sees]
        if blind:
            self.abort()
            raise ConfigurationError(
                f"Rank 0 has made a folder beside {self._staged.final}, but it is not there for the ranks {blind}, so "
                "their predictions would be missing. Choose an `output_path` on a file system that all nodes share."
            )

    def add(self, start: int, predictions: Any) -> None:
        self._rows.add(start, predictions)

    def finish(self) -> StoredPredictions:
        try:
            everyones = self._exchange_when_written()
            kinds, structure = _agreed([facts for facts, _ in everyones])
            rows_per_block = _rows_per_block(kinds, self._block_bytes)
            self._ranks.do_on_first(lambda: self._publish(everyones, kinds, structure, rows_per_block))
        except BaseException:
            self.abort()
            raise
        return StoredPredictions(self._staged.final)

    def abort(self) -> None:
        self._staged.abort()

    def _write_block(self, block: Leaves) -> None:
        self._files.append(self._staged.write_file(_block_name(self._ranks.index, len(self._files)), chunks(block)))

    def _exchange_when_written(self) -> list[tuple[_Facts, list[FileEntry]]]:
        """What each rank has, once all have written everything; the error of any is raised on all."""
        failure = None
        try:
            self._rows.finish()
        except PytorchAcceleratedError as error:
            failure = error
        failures = self._ranks.exchange(None if failure is None else str(failure))
        if any(failures):
            told = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(failures) if text)
            raise CheckpointError(f"Not all ranks could write their predictions. {told}") from failure
        return self._ranks.exchange((self._rows.facts(), self._files))

    def _publish(
        self, everyones: list[tuple[_Facts, list[FileEntry]]], kinds: Kinds, structure: Any, rows_per_block: int
    ) -> None:
        pieces = pieces_in_order([facts.batches for facts, _ in everyones], rows_per_block)
        order = torch.tensor(pieces, dtype=torch.int64, device="cpu").reshape(-1, len(Piece._fields))
        files = [self._staged.write_file(_ORDER_NAME, chunks({"pieces": order}))]
        facts = {
            PREDICTIONS_FORMAT: _FORMAT,
            "rows": sum(piece.rows for piece in pieces),
            "structure": structure,
            "tensors": kinds,
        }
        _refuse_what_is_there(self._staged.final)  # it may have come in the meantime
        self._staged.commit(facts, itertools.chain(files, *(theirs for _, theirs in everyones)))


class StoredPredictions:
    """Predictions in a folder, as `Trainer.predict(..., output_path=...)` wrote them. `len` is the number of rows.

    Tuples, lists and dicts come back as they were, named tuples with the same fields but a class of their own. No code
    is executed by reading. Every file is checked against its SHA-256 before a row of it is used.

    Args:
        path: the folder.

    Raises:
        InvalidCheckpointError: if it holds no complete predictions, or some that this version does not know.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path).absolute()
        if not (self.path / MANIFEST_NAME).is_file():
            raise InvalidCheckpointError(
                f"{self.path} holds no complete predictions: there is no {MANIFEST_NAME} in it. Give the folder that "
                "was the `output_path` of `Trainer.predict`."
            )
        manifest = read_manifest(self.path)
        written = manifest.facts.get(PREDICTIONS_FORMAT)
        if written != _FORMAT:
            found = "something else than predictions" if written is None else f"predictions of format {written}"
            raise InvalidCheckpointError(
                f"{self.path} holds {found}; this version of pytorch-accelerated reads predictions of format "
                f"{_FORMAT}. Give another folder, or install the version that wrote it."
            )
        self._rows: int = manifest.facts["rows"]
        self._structure = manifest.facts["structure"]
        self._kinds: Kinds = manifest.facts["tensors"]
        self._files = {entry.name: entry for entry in manifest.files}
        missing = [name for name in self._files if not (self.path / name).is_file()]
        if missing:
            raise InvalidCheckpointError(
                f"{self.path} is damaged: {', '.join(missing)} is missing. Copy it again, or predict again."
            )

    def __len__(self) -> int:
        return self._rows

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self.path)!r})"

    def load(self) -> Any:
        """All rows in host memory: nested tensors, in dataset order.

        Raises:
            InvalidCheckpointError: if a file was changed.
        """
        result = _empty_rows(self._kinds, self._rows)
        position = 0
        for block in self._blocks(BLOCK_BYTES):
            rows = _number_of_rows(block)
            for path, leaf in block.items():
                result[path][position : position + rows] = leaf
            position += rows
        return _filled(self._structure, result)

    def blocks(self, *, block_bytes: int = BLOCK_BYTES) -> Iterator[Any]:
        """The rows block by block, in dataset order: nested tensors as `load` returns them, with fewer rows.

        Memory stays flat: a block is the only thing that is read into it.

        Args:
            block_bytes: size of a block; it has at least one row.

        Raises:
            InvalidCheckpointError: if a file was changed.
        """
        return (_filled(self._structure, block) for block in self._blocks(block_bytes))

    def _blocks(self, block_bytes: int) -> Iterator[Leaves]:
        blocks = _Blocks(self._kinds, _rows_per_block(self._kinds, block_bytes))
        opened: dict[int, tuple[int, Any]] = {}  # one block of each rank, because they come one after the other
        for piece in self._pieces():
            if piece.rank not in opened or opened[piece.rank][0] != piece.block:
                opened[piece.rank] = piece.block, self._open_block(_block_name(piece.rank, piece.block))
            _, file = opened[piece.rank]
            rows = slice(piece.first, piece.first + piece.rows)
            yield from blocks.put({path: file.get_slice(path)[rows] for path in self._kinds})
        yield from blocks.rest()

    def _pieces(self) -> Iterator[Piece]:
        entry = self._files[_ORDER_NAME]
        with open_verified(self.path, entry) as read_into:
            order = read_tensors(read_into, entry.size_bytes, what=str(self.path / entry.name))["pieces"]
        return itertools.starmap(Piece, order.tolist())

    def _open_block(self, name: str) -> Any:
        """A file whose rows can be read a few at a time, after it was checked as a whole."""
        entry = self._files[name]
        buffer = memoryview(bytearray(2**20))
        with open_verified(self.path, entry) as read_into:
            for position in range(0, entry.size_bytes, len(buffer)):
                read_into(buffer[: entry.size_bytes - position])
        return safe_open(self.path / name, framework="pt")


class Piece(NamedTuple):
    """Some neighbouring rows of the result: `rows` of them, from row `first` of block `block` of rank `rank` on."""

    rank: int
    block: int
    first: int
    rows: int


def pieces_in_order(batches: Sequence[Sequence[tuple[int, int]]], rows_per_block: int) -> list[Piece]:
    """Where the rows of the result are, in order.

    Args:
        batches: start and number of rows of each rank's batches, as each rank added them.
        rows_per_block: number of rows of every block but a rank's last one.

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


def _targets_by_block(pieces: Iterable[Piece]) -> list[list[tuple[int, Piece]]]:
    """For the first block of all ranks, the second, …: its pieces, each with its position in the result."""
    targets: dict[int, list[tuple[int, Piece]]] = collections.defaultdict(list)
    position = 0
    for piece in pieces:
        targets[piece.block].append((position, piece))
        position += piece.rows
    return [targets[block] for block in sorted(targets)]


class _Facts(NamedTuple):
    """What the other ranks need to know of a rank's rows.

    Attributes:
        kinds: of its tensors; empty if it had no batch.
        structure: with the paths of the tensors in place of them, and each named tuple as an ordered dict, because a
            class can be neither stored nor sent.
        batches: start and number of rows of each, as they were added.
    """

    kinds: Kinds
    structure: Any
    batches: list[tuple[int, int]]


class _CollectedRows:
    """Takes batches of predictions to host memory and hands them on in blocks.

    Args:
        keep: called with each block: full ones as soon as they are, the rest at `finish`.
        block_bytes: size of a block; it has at least one row.
        storable: the dtypes that `keep` can take; None: all.
    """

    def __init__(
        self, keep: Callable[[Leaves], None], *, block_bytes: int, storable: Container[torch.dtype] | None = None
    ) -> None:
        self.structure: Any = None  # of the first batch, with the paths of the tensors in place of them
        self._keep = keep
        self._block_bytes = block_bytes
        self._storable = storable
        self._kinds: Kinds = {}
        self._batches: list[tuple[int, int]] = []
        self._blocks: _Blocks | None = None
        self._in_flight: tuple[Leaves, list[torch.cuda.Event]] | None = None

    def facts(self) -> _Facts:
        return _Facts(self._kinds, _without_classes(self.structure), self._batches)

    def add(self, start: int, predictions: Any) -> None:
        leaves = self._checked(start, predictions)
        self._batches.append((start, _number_of_rows(leaves)))
        devices = {leaf.device for leaf in leaves.values() if leaf.is_cuda}
        # On the way from a CUDA device torch puts the copy into pinned memory; what is in host memory already must be
        # copied too if it has to wait for the others, because its owner may go on using it.
        on_host = {
            path: leaf.detach().to("cpu", non_blocking=leaf.is_cuda, copy=bool(devices))
            for path, leaf in leaves.items()
        }
        arrivals = [torch.cuda.current_stream(device).record_event() for device in devices]
        self._settle()
        self._in_flight = on_host, arrivals
        if not arrivals:
            self._settle()

    def finish(self) -> None:
        self._settle()
        if self._blocks is not None:
            for block in self._blocks.rest():
                self._keep(block)

    def _settle(self) -> None:
        """Wait for the batch on its way, if there is one, and put its rows below the others."""
        if self._in_flight is None:
            return
        leaves, arrivals = self._in_flight
        self._in_flight = None
        for arrival in arrivals:
            arrival.synchronize()
        assert self._blocks is not None
        for block in self._blocks.put(leaves):
            self._keep(block)

    def _checked(self, start: int, predictions: Any) -> Leaves:
        where = f"The predictions of the batch that begins at row {start}"
        leaves: Leaves = {}
        complaints: list[str] = []

        def store(path: str, leaf: Any) -> str:
            try:
                leaves[path] = _as_tensor(leaf)
            except TypeError as error:
                complaints.append(f"{path} is {error}")
            return path

        structure = _map_leaves(store, predictions)
        if complaints:
            raise ArgumentTypeError(
                f"{where} hold something else than tensors: {'; '.join(complaints)}. Return tensors or arrays with one "
                "row per sample from `calculate_predict_batch_outputs`, alone or in tuples, lists and dicts, and leave "
                "the rest out."
            )
        lengths = {leaf.shape[0] if leaf.ndim else None for leaf in leaves.values()}
        if len(lengths) != 1 or None in lengths:
            found = ", ".join(
                f"{path} has {len(leaf)}" if leaf.ndim else f"{path} is a single number"
                for path, leaf in leaves.items()
            )
            raise DataError(
                f"{where} must have one row per sample in each tensor, but {found or 'there is no tensor'}. Return "
                "such rows from `calculate_predict_batch_outputs`, and leave out what belongs to the whole batch."
            )
        kinds = {path: (leaf.dtype, tuple(leaf.shape[1:])) for path, leaf in leaves.items()}
        if self._blocks is None:
            self._begin(kinds, structure)
        elif kinds != self._kinds:
            raise DataError(
                f"{where} cannot be put below those before them: {_difference(kinds, self._kinds)}. Return rows of one "
                "shape and dtype from `calculate_predict_batch_outputs`; pad them there if their lengths vary."
            )
        return leaves

    def _begin(self, kinds: Kinds, structure: Any) -> None:
        if self._storable is not None:
            refused = [f"{path} is {dtype}" for path, (dtype, _) in kinds.items() if dtype not in self._storable]
            if refused:
                raise ArgumentTypeError(
                    f"Some predictions have a dtype that safetensors files cannot hold: {', '.join(refused)}. Convert "
                    "them in `calculate_predict_batch_outputs`, or predict without `output_path`."
                )
        self.structure = structure
        self._kinds = kinds
        self._blocks = _Blocks(kinds, _rows_per_block(kinds, self._block_bytes))


class _Blocks:
    """Puts rows below each other in host memory, in blocks of `rows_per_block` rows. Every block is new memory."""

    def __init__(self, kinds: Kinds, rows_per_block: int) -> None:
        self._kinds = kinds
        self._rows_per_block = rows_per_block
        self._block = _empty_rows(kinds, 0)
        self._filled = 0

    def put(self, leaves: Leaves) -> Iterator[Leaves]:
        """Copy `leaves` behind what is there, and yield the blocks that this fills."""
        done, rows = 0, _number_of_rows(leaves)
        while done < rows:
            if self._filled == 0:
                self._block = _empty_rows(self._kinds, self._rows_per_block)
            size = min(rows - done, self._rows_per_block - self._filled)
            for path, leaf in leaves.items():
                self._block[path][self._filled : self._filled + size] = leaf[done : done + size]
            done += size
            self._filled += size
            if self._filled == self._rows_per_block:
                self._filled = 0
                yield self._block

    def rest(self) -> Iterator[Leaves]:
        """Yield the last block, unless it is empty, without the memory that it did not fill."""
        if self._filled:
            yield {path: leaf[: self._filled].clone() for path, leaf in self._block.items()}


def _map_leaves(function: Callable[[str, Any], Any], data: Any, path: str = _ROOT) -> Any:
    """`data` with ``function(path, leaf)`` for everything in it that is no container; mappings become dicts."""
    if isinstance(data, Mapping):
        return {key: _map_leaves(function, item, f"{path}[{key!r}]") for key, item in data.items()}
    if isinstance(data, tuple) and hasattr(data, "_fields"):
        fields = zip(data._fields, data, strict=True)
        return type(data)(*(_map_leaves(function, item, f"{path}.{field}") for field, item in fields))
    if isinstance(data, (tuple, list)):
        items = (_map_leaves(function, item, f"{path}[{index}]") for index, item in enumerate(data))
        return tuple(items) if isinstance(data, tuple) else list(items)
    return function(path, data)


def _without_classes(structure: Any) -> Any:
    """A structure with each named tuple as an ordered dict of its fields."""
    if isinstance(structure, dict):
        return {key: _without_classes(item) for key, item in structure.items()}
    if isinstance(structure, tuple) and hasattr(structure, "_fields"):
        return collections.OrderedDict(zip(structure._fields, map(_without_classes, structure), strict=True))
    if isinstance(structure, (tuple, list)):
        return type(structure)(map(_without_classes, structure))
    return structure


def _filled(structure: Any, leaves: Leaves) -> Any:
    """A structure, with classes or without, with its tensors in place of their paths."""
    if isinstance(structure, collections.OrderedDict):
        return collections.namedtuple("Predictions", structure)(*(_filled(item, leaves) for item in structure.values()))
    if isinstance(structure, dict):
        return {key: _filled(item, leaves) for key, item in structure.items()}
    if isinstance(structure, tuple) and hasattr(structure, "_fields"):
        return type(structure)(*(_filled(item, leaves) for item in structure))
    if isinstance(structure, (tuple, list)):
        return type(structure)(_filled(item, leaves) for item in structure)
    return leaves[structure]


def _as_tensor(leaf: Any) -> torch.Tensor:
    """A dense tensor.

    Raises:
        TypeError: if it is none; says what it is instead.
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


def _empty_rows(kinds: Kinds, rows: int) -> Leaves:
    # Not inference tensors, in whatever mode the pass runs: the result is for any use.
    with torch.inference_mode(False):
        return {path: torch.empty((rows, *shape), dtype=dtype, device="cpu") for path, (dtype, shape) in kinds.items()}


def _number_of_rows(leaves: Leaves) -> int:
    return len(next(iter(leaves.values())))


def _rows_per_block(kinds: Kinds, block_bytes: int) -> int:
    row_bytes = sum(dtype.itemsize * math.prod(shape) for dtype, shape in kinds.values())
    return max(1, block_bytes // max(1, row_bytes))


def _octets(rows: torch.Tensor) -> torch.Tensor:
    """The same memory as uint8, one row for each of `rows`."""
    return rows.reshape(len(rows), math.prod(rows.shape[1:])).view(torch.uint8)


def _agreed(everyones: Sequence[_Facts]) -> tuple[Kinds, Any]:
    """Kinds and structure of all ranks' predictions; without any batch, those of an empty vector.

    Raises:
        DataError: if they differ.
    """
    known = [(rank, facts) for rank, facts in enumerate(everyones) if facts.kinds]
    if not known:
        return {_ROOT: (torch.float32, ())}, _ROOT
    (first, expected), *others = known
    for rank, facts in others:
        if facts.kinds != expected.kinds:
            raise DataError(
                f"The predictions of rank {rank} cannot be put below those of rank {first}: "
                f"{_difference(facts.kinds, expected.kinds)}. Return rows of one shape and dtype from "
                "`calculate_predict_batch_outputs`; pad them there to the same length on all ranks if it varies."
            )
    return expected.kinds, expected.structure


def _difference(found: Kinds, expected: Kinds) -> str:
    def described(kind: tuple[torch.dtype, tuple[int, ...]] | None) -> str:
        return "missing" if kind is None else f"{kind[0]} with rows of shape {kind[1]}"

    return ", ".join(
        f"{path} is {described(found.get(path))} instead of {described(expected.get(path))}"
        for path in {**expected, **found}
        if found.get(path) != expected.get(path)
    )


def _block_name(rank: int, block: int) -> str:
    return f"rank{rank:05}-{block:05}.safetensors"


def _begin(output_path: str | os.PathLike[str]) -> StagedFolder:
    if not isinstance(output_path, (str, os.PathLike)):
        raise ArgumentTypeError(
            f"`output_path` is a {type(output_path).__name__} ({output_path!r}), which names no folder. Pass a path."
        )
    _refuse_what_is_there(Path(output_path).resolve())
    return begin(output_path)


def _refuse_what_is_there(final: Path) -> None:
    with explained(final):
        if final.exists() and not (final.is_dir() and not any(final.iterdir())):
            raise ConfigurationError(
                f"{final} is there already, and predictions would have to replace it. Choose a new `output_path`, or "
                "delete what is there."
            )
