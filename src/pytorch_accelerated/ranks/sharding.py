"""Sharded tensors (`DTensor`), as created by FSDP2 (`fully_shard`) and tensor parallelism."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from pytorch_accelerated.facts.optional import require
from pytorch_accelerated.facts.trees import map_leaves

if TYPE_CHECKING:
    from typing import TypeGuard

    from torch.distributed.tensor import DTensor


def is_sharded(value: Any) -> TypeGuard[DTensor]:
    """Whether `value` is a sharded tensor, or this rank's part of one."""
    if isinstance(value, Shard):
        return True
    module = sys.modules.get("torch.distributed.tensor")  # there is no such tensor if nobody imported it
    return module is not None and isinstance(value, module.DTensor)


def has_shards(model: Any) -> bool:
    """Whether any parameter of `model` is sharded, by torch or by DeepSpeed's ZeRO 3."""
    return isinstance(model, nn.Module) and any(is_sharded(each) or is_in_pieces(each) for each in model.parameters())


def is_in_pieces(parameter: Any) -> bool:
    """Whether DeepSpeed's ZeRO 3 has cut up `parameter`, which is an empty tensor then, except while in use."""
    return hasattr(parameter, "ds_tensor")


def pieces_of(model: nn.Module) -> dict[str, Any]:
    """This rank's parts (`Piece`) of the parameters that DeepSpeed's ZeRO 3 has cut up, by name."""
    found = {name: each for name, each in model.named_parameters(remove_duplicate=False) if is_in_pieces(each)}
    module = require("pytorch_accelerated.extras.deepspeed.pieces", needed_by="ZeRO 3") if found else None
    return {name: module.piece_of(each) for name, each in found.items()} if module else {}


@dataclass(frozen=True)
class Shard:
    """This rank's part of a sharded tensor.

    Attributes:
        shape: of the whole tensor.
        place: start and end of the part in each dimension of the whole tensor. A single pair, whatever the shape, if
            the part is a row of its numbers: DeepSpeed cuts tensors like that.
        part: the part, which may be empty. Not a copy.
        is_replica: whether a rank with a lower number has the same part.
    """

    shape: torch.Size
    place: list[tuple[int, int]]
    part: torch.Tensor
    is_replica: bool

    def to_local(self) -> torch.Tensor:
        """The part."""
        return self.part


def shard_of(tensor: Any) -> Shard:
    """This rank's part of `tensor`, and its place."""
    if isinstance(tensor, Shard):
        return tensor
    (chunk,) = tensor.__create_chunk_list__()  # torch's protocol for checkpoints
    coordinates = zip(tensor.placements, tensor.device_mesh.get_coordinate() or (), strict=False)
    is_replica = any(place.is_replicate() and coordinate for place, coordinate in coordinates)
    place = [(start, start + size) for start, size in zip(chunk.offsets, chunk.sizes, strict=True)]
    return Shard(tensor.shape, place, tensor.to_local().detach(), is_replica)


def own_part(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's shard of `tensor`, which may be empty; for a plain tensor, all of it. Not a copy."""
    return tensor.to_local() if is_sharded(tensor) else tensor


def own_parts(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """This rank's shards of `tensors`, without empty ones."""
    return [part for part in map(own_part, tensors) if part.numel()]


def whole(value: Any) -> Any:
    """`value` with its sharded tensors gathered, on their device. Must be called by all ranks.

    Args:
        value: nested dicts, such as state dicts, whose type and attributes (such as a module's versions) are kept.
            Other containers stay as they are.
    """
    return map_leaves(
        lambda leaf: leaf.full_tensor() if is_sharded(leaf) else leaf,
        value,
        keep_mappings=True,
        parts=lambda data: list(data.values()) if isinstance(data, dict) else None,
    )


def sharded_like(live: torch.Tensor, value: Any) -> Any:
    """A whole tensor sharded like `live`, if `live` is sharded and has the same shape; otherwise `value` as it is."""
    if not is_sharded(live) or is_sharded(value) or getattr(value, "shape", None) != live.shape:
        return value
    if isinstance(live, Shard):
        return replace(live, part=value.reshape(-1)[slice(*live.place[0])])
    from torch.distributed.tensor import distribute_tensor

    # No source rank: every rank has the whole tensor and takes its own shard from it.
    return distribute_tensor(value.to(live.device), live.device_mesh, live.placements, src_data_rank=None)
