"""Sharded tensors as files of a state folder.

`torch.distributed.checkpoint` plans which rank writes and reads which piece of which tensor, even when another number
of ranks reads it. Its own files hold pickles. Here each rank writes its pieces to one safetensors file, under names
that say where they belong (``model/0.weight[4:7,0:5]``), and rank 0 lists the tensors in ``shards.json``.

This module is imported where it is used: most runs have nothing sharded, and the import is slow.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from pytorch_accelerated.checkpointing.formats import DTYPE_NAMES, DTYPES, chunks, dump_json, read_tensors
from pytorch_accelerated.checkpointing.layout import SHARDS_FILE, SHARDS_NAME, FileEntry
from pytorch_accelerated.checkpointing.publish import StagedFolder
from pytorch_accelerated.checkpointing.verify import open_verified, tensors_of_file
from pytorch_accelerated.errors import CheckpointError, InvalidCheckpointError, PytorchAcceleratedError
from pytorch_accelerated.processes.ranks import Ranks

MakeTarget = Callable[[str, torch.Size, torch.dtype], torch.Tensor]


def write_shards(ranks: Ranks, staged: StagedFolder, tensors: Mapping[str, torch.Tensor]) -> list[FileEntry]:
    """Write each rank's parts of `tensors`, named uniquely in the state, to a folder that all ranks can reach.

    Must be called by all ranks, with the same tensors.

    Returns:
        On rank 0 the files of all ranks, for `StagedFolder.commit`.

    Raises:
        CheckpointError: on every rank, if any rank could not write its file.
    """
    ranks.wait()
    writer = _Writer(staged, ranks.index)
    try:
        save(
            dict(tensors),
            storage_writer=writer,
            planner=DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
            process_group=ranks.group,
        )
    except CheckpointException as error:
        raise _cause(error, staged.final) from error
    return writer.files


def read_shards(
    folder: Path, entries: Mapping[str, FileEntry], layout: Any, make_target: MakeTarget
) -> dict[str, torch.Tensor]:
    """The sharded tensors of a state folder. Reads and checks only the files that this rank needs.

    Args:
        folder, entries: of the state, and its files by name.
        layout: the content of ``shards.json``.
        make_target: returns the tensor to fill for a name, shape and dtype; a sharded one gets this rank's part.

    Raises:
        InvalidCheckpointError: if `layout` is invalid, or a file is damaged.
    """
    metadata = _metadata(folder, entries, layout)
    targets = {name: make_target(name, one.size, one.properties.dtype) for name, one in _tensors(metadata).items()}
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
            load(
                targets,
                storage_reader=_Reader(folder, entries, metadata),
                planner=DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
                no_dist=True,  # each rank knows by itself what it needs
            )
    except CheckpointException as error:
        raise _cause(error, folder) from error
    return targets


class _AsPlanned:
    """Executes the plan of torch's planner unchanged."""

    def reset(self, checkpoint_id: Any = None) -> None:
        pass

    def prepare_local_plan(self, plan: Any) -> Any:
        return plan

    def prepare_global_plan(self, plans: Any) -> Any:
        return plans

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True


class _Writer(_AsPlanned, StorageWriter):
    """Writes the pieces for `checkpoint.save`.

    Attributes:
        files: on rank 0, after the save, the files of all ranks.
    """

    def __init__(self, staged: StagedFolder, rank: int) -> None:
        self.files: list[FileEntry] = []
        self._staged = staged
        self._rank = rank

    def write_data(self, plan: Any, planner: Any) -> Future[list[WriteResult]]:
        tensors = {_piece_name(item): planner.resolve_data(item) for item in plan.items}
        results = []
        if tensors:
            entry = self._staged.write_file(f"shards_{self._rank}.safetensors", chunks(tensors))
            results = [WriteResult(item.index, 0, entry) for item in plan.items]
        return _done(results)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        layout = {
            name: {"dtype": DTYPE_NAMES[tensor.properties.dtype], "shape": list(tensor.size)}
            for name, tensor in _tensors(metadata).items()
        }
        written = {entry.name: entry for entry in (result.storage_data for of_rank in results for result in of_rank)}
        self.files = [*written.values(), self._staged.write_file(SHARDS_NAME, [dump_json(layout)])]

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass


class _Reader(_AsPlanned, StorageReader):
    """Reads the pieces for `checkpoint.load`."""

    def __init__(self, folder: Path, entries: Mapping[str, FileEntry], metadata: Metadata) -> None:
        self._folder = folder
        self._entries = entries
        self._metadata = metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._metadata

    def read_data(self, plan: Any, planner: Any) -> Future[None]:
        wanted: dict[str, dict[str, list[Any]]] = {}
        for item in plan.items:
            file, piece = self._metadata.storage_data[item.storage_index]
            wanted.setdefault(file, {}).setdefault(piece, []).append(item)
        for file, items in wanted.items():
            self._read_file(file, items, planner)
        return _done(None)

    def _read_file(self, file: str, wanted: Mapping[str, list[Any]], planner: Any) -> None:
        entry, what = self._entries[file], str(self._folder / file)
        with open_verified(self._folder, entry) as read_into:
            for name, piece in read_tensors(read_into, entry.size_bytes, what=what):
                for item in wanted.get(name, ()):
                    spans = zip(item.storage_offsets, item.lengths, strict=True)
                    target = planner.resolve_tensor(item)
                    target.copy_(piece[tuple(slice(start, start + length) for start, length in spans)])
                    planner.commit_tensor(item, target)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass


def _piece_name(item: Any) -> str:
    piece = item.tensor_data.chunk
    spans = (f"{start}:{start + size}" for start, size in zip(piece.offsets, piece.sizes, strict=True))
    return f"{item.index.fqn}[{','.join(spans)}]"


def _parsed_piece_name(name: str) -> tuple[str, ChunkStorageMetadata]:
    """The inverse of `_piece_name`."""
    tensor, _, places = name.removesuffix("]").rpartition("[")
    spans = [tuple(map(int, span.split(":"))) for span in places.split(",") if span]
    return tensor, ChunkStorageMetadata(
        torch.Size([start for start, _ in spans]), torch.Size([stop - start for start, stop in spans])
    )


def _metadata(folder: Path, entries: Mapping[str, FileEntry], layout: Any) -> Metadata:
    """`layout` and the pieces in the files as torch's metadata, checked for consistency."""
    places: dict[MetadataIndex, tuple[str, str]] = {}
    tensors: dict[str, Any] = {}
    try:
        for name, facts in layout.items():
            properties = TensorProperties(dtype=DTYPES[facts["dtype"]])
            tensors[name] = TensorStorageMetadata(properties, torch.Size(facts["shape"]), [])
        for file in filter(SHARDS_FILE.fullmatch, entries if tensors else ()):
            # The file is verified by the ranks that read pieces from it.
            for piece_name, _, _ in tensors_of_file(folder / file):
                name, piece = _parsed_piece_name(piece_name)
                if name in tensors:
                    tensors[name].chunks.append(piece)
                    places[MetadataIndex(name, piece.offsets)] = (file, piece_name)
        for name, tensor in tensors.items():
            if sum(math.prod(piece.sizes) for piece in tensor.chunks) != math.prod(tensor.size):
                raise ValueError(f"the pieces of {name!r} do not cover it")
    except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise InvalidCheckpointError(
            f"{folder / SHARDS_NAME} and the files of its pieces are inconsistent ({type(error).__name__}: {error}). "
            "They were changed, or written by another version of this library."
        ) from error
    return Metadata(tensors, storage_data=places)


def _tensors(metadata: Metadata) -> dict[str, TensorStorageMetadata]:
    return {
        name: facts for name, facts in metadata.state_dict_metadata.items() if isinstance(facts, TensorStorageMetadata)
    }


def _cause(error: CheckpointException, folder: Path) -> PytorchAcceleratedError:
    """The first of the ranks' errors that is ours, or a new one that lists them."""
    failures = [failure for _, (failure, _) in sorted(error.failures.items())]
    new = CheckpointError(f"The sharded tensors of {folder} could not be stored or loaded ({failures}).")
    return next((failure for failure in failures if isinstance(failure, PytorchAcceleratedError)), new)


def _done(value: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(value)
    return future
