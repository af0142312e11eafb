"""Sharded tensors as files of a state folder.

Each rank writes its pieces to one safetensors file, under names that say where they belong
(``model/0.weight[4:7,0:5]``), and rank 0 lists the tensors in ``shards.json``. Any number of ranks can read them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from pytorch_accelerated.checkpointing.formats import DTYPE_NAMES, DTYPES, chunks, dump_json, read_tensors
from pytorch_accelerated.checkpointing.layout import SHARDS_FILE, SHARDS_NAME, FileEntry
from pytorch_accelerated.checkpointing.publish import StagedFolder
from pytorch_accelerated.checkpointing.verify import open_verified, tensors_of_file
from pytorch_accelerated.errors import InvalidCheckpointError
from pytorch_accelerated.models.sharding import Shard, is_sharded, own_part, shard_of
from pytorch_accelerated.processes.ranks import Ranks

MakeTarget = Callable[[str, torch.Size, torch.dtype], torch.Tensor]
Place = list[tuple[int, int]]
"""Start and end of a piece in each dimension."""


def write_shards(ranks: Ranks, staged: StagedFolder, shards: Mapping[str, Shard]) -> list[FileEntry]:
    """Write each rank's `shards`, named uniquely in the state, to a folder that all ranks can reach.

    Must be called by all ranks, with parts of the same tensors.

    Returns:
        The files of all ranks, for `StagedFolder.commit`.

    Raises:
        CheckpointError: on every rank, if any rank could not write its file.
    """

    def write() -> list[FileEntry]:
        own = {
            f"{name}[{','.join(f'{start}:{end}' for start, end in shard.place)}]": shard.part
            for name, shard in shards.items()
            if shard.part.numel() and not shard.is_replica
        }
        files = [staged.write_file(f"shards_{ranks.index}.safetensors", chunks(own))] if own else []
        if ranks.is_first:
            layout = {
                name: {"dtype": DTYPE_NAMES[shard.part.dtype], "shape": list(shard.shape)}
                for name, shard in shards.items()
            }
            files.append(staged.write_file(SHARDS_NAME, [dump_json(layout)]))
        return files

    return [entry for files in ranks.exchange(ranks.do_on_all(write)) for entry in files]


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
    files = filter(SHARDS_FILE.fullmatch, entries if layout else ())
    try:
        tensors = {name: (torch.Size(facts["shape"]), DTYPES[facts["dtype"]]) for name, facts in layout.items()}
        pieces = {file: dict(_pieces_of(folder / file)) for file in files}
        missing = {name: math.prod(shape) for name, (shape, _) in tensors.items()}
        for name, place in (piece for of_file in pieces.values() for piece in of_file.values()):
            if name in missing:
                missing[name] -= math.prod(end - start for start, end in place)
        if any(missing.values()):
            raise ValueError(f"the pieces of {[name for name, count in missing.items() if count]} do not cover them")
    except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise InvalidCheckpointError(
            f"{folder / SHARDS_NAME} and the files of its pieces are inconsistent ({type(error).__name__}: {error})."
        ) from error
    targets = {name: make_target(name, *facts) for name, facts in tensors.items()}
    places = {
        name: shard_of(target).place if is_sharded(target) else [(0, size) for size in target.shape]
        for name, target in targets.items()
    }
    for file, of_file in pieces.items():
        common = {piece: _common(place, places[name]) for piece, (name, place) in of_file.items() if name in targets}
        wanted = {piece for piece, spans in common.items() if all(start < end for start, end in spans)}
        if not wanted:
            continue
        with open_verified(folder, entries[file]) as read_into, torch.no_grad():
            for piece, values in read_tensors(read_into, entries[file].size_bytes, what=str(folder / file)):
                if piece in wanted:
                    name, place = of_file[piece]
                    part = values[_within(common[piece], place)]
                    own_part(targets[name])[_within(common[piece], places[name])].copy_(part)
    return targets


def _pieces_of(file: Path) -> Iterator[tuple[str, tuple[str, Place]]]:
    """The names of the pieces in a file, with their tensors and places. The ranks that read them verify the file."""
    for piece, _, _ in tensors_of_file(file):
        name, _, spans = piece.removesuffix("]").rpartition("[")
        start_and_end = [span.split(":") for span in spans.split(",") if span]
        yield piece, (name, [(int(start), int(end)) for start, end in start_and_end])


def _common(first: Place, second: Place) -> Place:
    return [(max(a, b), min(c, d)) for (a, c), (b, d) in zip(first, second, strict=True)]


def _within(spans: Place, place: Place) -> tuple[slice, ...]:
    """The indices of `spans` in a piece that lies at `place`."""
    return tuple(slice(start - first, end - first) for (start, end), (first, _) in zip(spans, place, strict=True))
