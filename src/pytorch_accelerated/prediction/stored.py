"""Predictions in a folder: each rank writes its rows in blocks as they come.

The folder is made by `checkpointing.publish` and appears complete or not at all. It contains

- ``rank00000-00000.safetensors``, …: one block each, tensors named by their path in the hook's result;
- ``order.safetensors``: `pieces`, int64 of shape (n, 4), with the fields of `Piece`: joined in this order, they are the
  result;
- ``manifest.json``: the number of rows, the structure, dtype and row shape of each tensor, and for each of the other
  files its size and SHA-256.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch.nn.utils.rnn import PackedSequence

from pytorch_accelerated.errors import ArgumentTypeError, ConfigurationError, HookOutputError, InvalidCheckpointError
from pytorch_accelerated.prediction.collecting import (
    BLOCK_BYTES,
    HOOK,
    CollectedRows,
    InMemoryPredictions,
    Kinds,
    Leaves,
    Piece,
    PredictionCollector,
    RowFacts,
    agreed,
    are_rows,
    empty_rows,
    filled,
    pieces_in_order,
)
from pytorch_accelerated.ranks.ranks import Ranks
from pytorch_accelerated.record.text import format_numbers, table_of_rows
from pytorch_accelerated.states.codec import DTYPE_NAMES, chunks
from pytorch_accelerated.states.disk import resolved
from pytorch_accelerated.states.layout import PREDICTIONS_FORMAT, FileEntry
from pytorch_accelerated.states.publish import StagedFolder, begin, explained
from pytorch_accelerated.states.state_folder import read_file_of_tensors
from pytorch_accelerated.states.verify import check_file, read_manifest

_VERSION = 1
_ORDER_NAME = "order.safetensors"
_SHOWN_ROWS = 10


def collect_predictions(ranks: Ranks, output_path: str | os.PathLike[str] | None = None) -> PredictionCollector:
    """A collector in memory or, with `output_path`, on disk. Must be called by all ranks."""
    return InMemoryPredictions(ranks) if output_path is None else StoredPredictionsWriter(ranks, output_path)


class StoredPredictionsWriter:
    """Streams predictions to a folder: `finish` returns a `StoredPredictions` on all ranks.

    Each rank writes its rows as soon as they fill a block, so memory use stays constant. The folder appears when all
    ranks are done. The files of a killed process have a hidden name next to it; the next pass that writes there deletes
    them.

    Args:
        ranks: the processes. All must see the same file system.
        output_path: the folder to create, with its parents.
        block_bytes: size from which on a block is written. A batch is never divided.

    Raises:
        ConfigurationError: if `output_path` exists and is not an empty folder.
        CheckpointError: if writing fails; also from `add` and `finish`.
    """

    def __init__(self, ranks: Ranks, output_path: str | os.PathLike[str], *, block_bytes: int = BLOCK_BYTES) -> None:
        self._ranks = ranks
        self._files: list[FileEntry] = []
        self._rows = CollectedRows(self._write_block, block_bytes=block_bytes)
        self._staged = ranks.do_on_first(lambda: _begin(output_path))

    def add(self, start: int, predictions: Any, samples: int | None = None) -> None:
        """See `PredictionCollector`."""
        if isinstance(predictions, PackedSequence) or are_rows(predictions, samples) is False:
            raise HookOutputError(
                f"{HOOK} returned one result per sample, but a folder holds rows of one shape. Predict without "
                "`output_path`, or return tensors with one row per sample, padded to the same length in every batch."
            )
        self._rows.take(start, predictions, samples)
        refused = [f"{path} is {dtype}" for path, (dtype, _) in self._rows.kinds.items() if dtype not in DTYPE_NAMES]
        if refused:
            raise ArgumentTypeError(
                f"Files cannot hold some predictions: {', '.join(refused)}. Convert them, or leave out `output_path`."
            )

    def finish(self) -> StoredPredictions:
        try:
            self._ranks.do_on_all(self._rows.finish)
            per_rank = self._ranks.exchange((self._rows.facts(), self._files))
            kinds, structure = agreed([facts for facts, _ in per_rank])
            self._ranks.do_on_first(lambda: self._publish(per_rank, kinds, structure))
        except BaseException:
            self.abort()
            raise
        return StoredPredictions(self._staged.final)

    def abort(self) -> None:
        self._staged.abort()

    def _write_block(self, block: Leaves) -> None:
        name = _block_name(self._ranks.index, len(self._files))
        self._files += self._staged.write_files([(name, chunks(block))])

    def _publish(self, per_rank: list[tuple[RowFacts, list[FileEntry]]], kinds: Kinds, structure: Any) -> None:
        pieces = pieces_in_order([facts.places for facts, _ in per_rank])
        order = torch.tensor(pieces, dtype=torch.int64, device="cpu").reshape(-1, len(Piece._fields))
        files = self._staged.write_files([(_ORDER_NAME, chunks({"pieces": order}))])
        facts = {
            PREDICTIONS_FORMAT: _VERSION,
            "rows": sum(piece.rows for piece in pieces),
            "structure": structure,
            "tensors": kinds,
        }
        _refuse_what_is_there(self._staged.final)  # it may have come in the meantime
        self._staged.commit(facts, itertools.chain(files, *(theirs for _, theirs in per_rank)))


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
        manifest = read_manifest(self.path)
        if manifest.facts.get(PREDICTIONS_FORMAT) != _VERSION:
            raise InvalidCheckpointError(
                f"{self.path} holds no predictions of format {_VERSION}, which this version reads. Install another one."
            )
        self._files = {entry.name: entry for entry in manifest.files}
        self._rows: int = manifest.facts["rows"]
        self._structure: Any = manifest.facts["structure"]
        self._kinds: Kinds = manifest.facts["tensors"]

    def __len__(self) -> int:
        return self._rows

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self.path)!r})"

    def _repr_html_(self) -> str:
        """For notebooks: a table of the first rows. Reads the first blocks."""
        rows = itertools.islice(self._blocks(0), _SHOWN_ROWS)
        return table_of_rows(
            {"row": str(row), **{path: format_numbers(leaf.reshape(-1).tolist()) for path, leaf in leaves.items()}}
            for row, leaves in enumerate(rows)
        )

    def load(self) -> Any:
        """All rows in host memory: nested tensors, in dataset order.

        Raises:
            InvalidCheckpointError: if a file was changed.
        """
        result, position = empty_rows(self._kinds, self._rows), 0
        for block in self._blocks(BLOCK_BYTES):
            for path, leaf in block.items():
                rows = len(leaf)
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
        for block in self._blocks(block_bytes):
            yield filled(self._structure, block)

    def _blocks(self, block_bytes: int) -> Iterator[Leaves]:
        row_bytes = sum(dtype.itemsize * math.prod(shape) for dtype, shape in self._kinds.values())
        size = max(1, block_bytes // max(1, row_bytes))
        opened: dict[int, tuple[int, Any]] = {}  # one block of each rank, because they come one after the other
        parts: list[Leaves] = []
        position = 0
        order = read_file_of_tensors(self.path, self._files[_ORDER_NAME])["pieces"]
        for rank, block, first, rows in order.tolist():
            if rank not in opened or opened[rank][0] != block:
                name = _block_name(rank, block)
                check_file(self.path / name, self._files[name])  # all of it, before a row is used
                opened[rank] = block, safe_open(self.path / name, framework="pt")
            end = first + rows
            while first < end:
                part = slice(first, min(end, first + size - position % size))
                parts.append({path: opened[rank][1].get_slice(path)[part] for path in self._kinds})
                position += part.stop - first
                first = part.stop
                if position % size == 0:
                    yield _joined(parts)
                    parts = []
        if parts:
            yield _joined(parts)


def _joined(parts: list[Leaves]) -> Leaves:
    return {path: torch.cat([part[path] for part in parts]) for path in parts[0]}


def _block_name(rank: int, block: int) -> str:
    return f"rank{rank:05}-{block:05}.safetensors"


def _begin(output_path: str | os.PathLike[str]) -> StagedFolder:
    _refuse_what_is_there(resolved(output_path))
    return begin(output_path)


def _refuse_what_is_there(final: Path) -> None:
    with explained(final):
        if final.exists() and not (final.is_dir() and not any(final.iterdir())):
            raise ConfigurationError(
                f"{final} exists already. Choose a new `output_path` for the predictions, or delete it."
            )
