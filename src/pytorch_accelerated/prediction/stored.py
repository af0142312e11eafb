"""Predictions in a folder: each rank writes its rows in blocks as they come.

The folder is made by `checkpointing.publish` and appears complete or not at all. It contains

- ``rank00000-00000.safetensors``, …: one block each, tensors named by their path in the hook's result;
- ``order.safetensors``: `pieces`, int64 of shape (n, 4), with the fields of `Piece`: joined in this order, they are the
  result;
- ``manifest.json``: the number of rows, the structure, dtype and row shape of each tensor, and for each of the other
  files its size and SHA-256.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from pytorch_accelerated.checkpointing.layout import MANIFEST_NAME, PREDICTIONS_FORMAT, FileEntry
from pytorch_accelerated.checkpointing.publish import StagedFolder, begin, explained
from pytorch_accelerated.checkpointing.reading import is_file, resolved
from pytorch_accelerated.checkpointing.tensor_file import DTYPE_NAMES, chunks, read_tensors
from pytorch_accelerated.checkpointing.verify import open_verified, read_manifest
from pytorch_accelerated.errors import (
    ArgumentTypeError,
    CheckpointError,
    ConfigurationError,
    InvalidCheckpointError,
    PytorchAcceleratedError,
)
from pytorch_accelerated.prediction.blocks import (
    BLOCK_BYTES,
    Blocks,
    Kinds,
    empty_rows,
    number_of_rows,
    rows_per_block,
)
from pytorch_accelerated.prediction.nested import Leaves, filled
from pytorch_accelerated.prediction.pieces import Piece, pieces_in_order
from pytorch_accelerated.prediction.rows import CollectedRows, RowFacts, agreed
from pytorch_accelerated.processes.ranks import Ranks
from pytorch_accelerated.tracking.html import html_of_facts

_FORMAT = 1
_ORDER_NAME = "order.safetensors"


class StoredPredictionsWriter:
    """Streams predictions to a folder: `finish` returns a `StoredPredictions` on all ranks.

    Each rank writes its rows as soon as they fill a block, so memory use stays constant. The folder appears when all
    ranks are done. The files of a killed process have a hidden name beside it; the next pass that writes there deletes
    them.

    Args:
        ranks: the processes. All must see the same file system.
        output_path: the folder to create, with its parents.
        block_bytes: size of a block. A row is never divided.

    Raises:
        ConfigurationError: if `output_path` exists and is not an empty folder, or some rank cannot see it.
        CheckpointError: if writing fails; also from `add` and `finish`.
    """

    def __init__(self, ranks: Ranks, output_path: str | os.PathLike[str], *, block_bytes: int = BLOCK_BYTES) -> None:
        self._ranks = ranks
        self._block_bytes = block_bytes
        self._files: list[FileEntry] = []
        self._rows = CollectedRows(self._write_block, block_bytes=block_bytes, storable=DTYPE_NAMES)
        self._staged = ranks.do_on_first(lambda: _begin(output_path))
        blind = [rank for rank, sees in enumerate(ranks.exchange(self._staged.staging.is_dir())) if not sees]
        if blind:
            self.abort()
            raise ConfigurationError(
                f"Rank 0 has created a folder beside {self._staged.final}, but the ranks {blind} cannot see it, so "
                "their predictions would be missing. Choose an `output_path` on a file system that all nodes share."
            )

    def add(self, start: int, predictions: Any) -> None:
        self._rows.add(start, predictions)

    def finish(self) -> StoredPredictions:
        try:
            everyones = self._exchange_when_written()
            kinds, structure = agreed([facts for facts, _ in everyones])
            self._ranks.do_on_first(lambda: self._publish(everyones, kinds, structure))
        except BaseException:
            self.abort()
            raise
        return StoredPredictions(self._staged.final)

    def abort(self) -> None:
        self._staged.abort()

    def _write_block(self, block: Leaves) -> None:
        self._files.append(self._staged.write_file(_block_name(self._ranks.index, len(self._files)), chunks(block)))

    def _exchange_when_written(self) -> list[tuple[RowFacts, list[FileEntry]]]:
        """The facts and files of each rank, once all have written everything. An error of one is raised on all."""
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

    def _publish(self, everyones: list[tuple[RowFacts, list[FileEntry]]], kinds: Kinds, structure: Any) -> None:
        pieces = pieces_in_order([facts.batches for facts, _ in everyones], rows_per_block(kinds, self._block_bytes))
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
    """Predictions that `Trainer.predict(..., output_path=...)` has written. `len` is the number of rows.

    Tuples, lists and dicts come back as they were, named tuples with the same fields but a class of their own. Reading
    executes no code. Every file is checked against its SHA-256 before a row of it is used.

    Args:
        path: the folder.

    Raises:
        InvalidCheckpointError: if the folder has no complete predictions, or predictions of an unknown format.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path).absolute()
        if not is_file(self.path / MANIFEST_NAME):
            raise InvalidCheckpointError(
                f"{self.path} holds no complete predictions: there is no {MANIFEST_NAME} in it. Pass the folder that "
                "was the `output_path` of `Trainer.predict`."
            )
        manifest = read_manifest(self.path)
        written = manifest.facts.get(PREDICTIONS_FORMAT)
        if written != _FORMAT:
            found = "something else than predictions" if written is None else f"predictions of format {written}"
            raise InvalidCheckpointError(
                f"{self.path} holds {found}; this version of pytorch-accelerated reads predictions of format "
                f"{_FORMAT}. Pass another folder, or install the version that wrote it."
            )
        self._files = {entry.name: entry for entry in manifest.files}
        with self._explained():
            self._rows, self._structure, self._kinds = _checked_facts(manifest.facts, manifest.files)
        missing = [name for name in self._files if not is_file(self.path / name)]
        if missing:
            raise InvalidCheckpointError(
                f"{self.path} is damaged: {', '.join(missing)} is missing. Copy it again, or predict again."
            )

    def __len__(self) -> int:
        return self._rows

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self.path)!r})"

    def _repr_html_(self) -> str:
        """For notebooks: where the predictions are, and what a row of them is."""
        kinds = [(path or "each row", f"{dtype}, {tuple(shape)}") for path, (dtype, shape) in self._kinds.items()]
        return html_of_facts(f"{type(self).__name__}, {self._rows} rows", [("folder", str(self.path)), *kinds])

    def load(self) -> Any:
        """All rows in host memory: nested tensors, in dataset order.

        Raises:
            InvalidCheckpointError: if a file was changed.
        """
        pieces = self._pieces()  # as many rows as there should be, so that each row of the result is filled
        with self._explained():
            result = empty_rows(self._kinds, self._rows)
            position = 0
            for block in self._blocks(BLOCK_BYTES, pieces):
                rows = number_of_rows(block)
                for path, leaf in block.items():
                    result[path][position : position + rows] = leaf
                position += rows
            return filled(self._structure, result)

    def blocks(self, *, block_bytes: int = BLOCK_BYTES) -> Iterator[Any]:
        """Yield the rows block by block, in dataset order: nested tensors as `load` returns them, with fewer rows.

        Memory use stays constant: only one block is in memory.

        Args:
            block_bytes: size of a block; it has at least one row.

        Raises:
            InvalidCheckpointError: if a file was changed.
        """
        with self._explained():
            for block in self._blocks(block_bytes, self._pieces()):
                yield filled(self._structure, block)

    def _blocks(self, block_bytes: int, pieces: list[Piece]) -> Iterator[Leaves]:
        blocks = Blocks(self._kinds, block_bytes)
        opened: dict[int, tuple[int, Any]] = {}  # one block of each rank, because they come one after the other
        for piece in pieces:
            if piece.rank not in opened or opened[piece.rank][0] != piece.block:
                opened[piece.rank] = piece.block, self._open_block(_block_name(piece.rank, piece.block))
            _, file = opened[piece.rank]
            yield from blocks.put({path: self._rows_of(file, path, piece) for path in self._kinds})
        yield from blocks.rest()

    def _rows_of(self, file: Any, path: str, piece: Piece) -> torch.Tensor:
        """The rows of a piece, after checking their dtype and shape."""
        dtype, shape = self._kinds[path]
        rows: torch.Tensor = file.get_slice(path)[piece.first : piece.first + piece.rows]
        if rows.dtype != dtype or rows.shape != (piece.rows, *shape):
            raise ValueError(f"{path} has {tuple(rows.shape)} of {rows.dtype} in a block")
        return rows

    def _pieces(self) -> list[Piece]:
        """The pieces that make up the result, after checking that they have the right number of rows."""
        with self._explained():
            entry = self._files[_ORDER_NAME]
            with open_verified(self.path, entry) as read_into:
                tensors = dict(read_tensors(read_into, entry.size_bytes, what=str(self.path / entry.name)))
            order = tensors["pieces"]  # the file is known to be unchanged by now
            if order.dtype != torch.int64 or order.ndim != 2 or order.shape[1] != len(Piece._fields):
                raise ValueError(f"{_ORDER_NAME} has {tuple(order.shape)} of {order.dtype}")
            if (order < 0).any() or (order >= 2**40).any() or int(order[:, -1].sum()) != self._rows:
                raise ValueError(f"{_ORDER_NAME} does not have {self._rows} rows")
            return list(itertools.starmap(Piece, order.tolist()))

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """Turn the errors that contents of another origin cause into an `InvalidCheckpointError`."""
        try:
            yield
        except (ArithmeticError, LookupError, RuntimeError, SafetensorError, TypeError, ValueError) as error:
            if isinstance(error, PytorchAcceleratedError):
                raise
            raise InvalidCheckpointError(
                f"{self.path} fits its manifest, but no run has written it ({type(error).__name__}: {error}). Predict "
                "again."
            ) from error

    def _open_block(self, name: str) -> Any:
        """Open a file for reading rows, after checking all of it."""
        entry = self._files[name]
        buffer = memoryview(bytearray(2**20))
        with open_verified(self.path, entry) as read_into:
            for position in range(0, entry.size_bytes, len(buffer)):
                read_into(buffer[: entry.size_bytes - position])
        return safe_open(self.path / name, framework="pt")


def _checked_facts(facts: dict[str, Any], files: tuple[FileEntry, ...]) -> tuple[int, Any, Kinds]:
    """Rows, structure and kinds. Raises an error of any kind if they are invalid, or too many for the files."""
    rows, structure, kinds = facts["rows"], facts["structure"], facts["tensors"]
    if type(rows) is not int or rows < 0 or not isinstance(kinds, dict):
        raise ValueError(f"it would have {rows!r} rows")
    for path, (dtype, shape) in kinds.items():
        sizes_fit = isinstance(shape, tuple) and all(type(size) is int and size >= 0 for size in shape)
        if not (isinstance(path, str) and isinstance(dtype, torch.dtype) and sizes_fit):
            raise ValueError(f"it has no kind of tensor at {path!r}")
    row_bytes = sum(dtype.itemsize * math.prod(shape) for dtype, shape in kinds.values())
    if rows * row_bytes > sum(entry.size_bytes for entry in files):
        raise ValueError(f"its files are too small for {rows} rows of {row_bytes} bytes")
    filled(structure, empty_rows(kinds, 0))  # each place in the structure has its tensor
    return rows, structure, kinds


def _block_name(rank: int, block: int) -> str:
    return f"rank{rank:05}-{block:05}.safetensors"


def _begin(output_path: str | os.PathLike[str]) -> StagedFolder:
    if not isinstance(output_path, (str, os.PathLike)):
        raise ArgumentTypeError(
            f"`output_path` is a {type(output_path).__name__} ({output_path!r}), not a path. Pass the path of a folder."
        )
    _refuse_what_is_there(resolved(output_path))
    return begin(output_path)


def _refuse_what_is_there(final: Path) -> None:
    with explained(final):
        if final.exists() and not (final.is_dir() and not any(final.iterdir())):
            raise ConfigurationError(
                f"{final} exists already, and predictions would have to replace it. Choose a new `output_path`, or "
                "delete it."
            )
