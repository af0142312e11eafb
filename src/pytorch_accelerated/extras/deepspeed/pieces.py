"""What a rank has of tensors that DeepSpeed has cut up: rows of their numbers in order.

The private members of DeepSpeed's optimizers that say which rows these are stand here, and nowhere else.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from pytorch_accelerated.ranks import Shard

MAIN = "main_weights"  # the entry of an optimizer's state for float32 weights, where the model's are in 16 bits
# What an engine, and what keeps its loss scale, know besides.
COUNTS = ("global_steps", "global_samples", "skipped_steps", "micro_steps")
SCALE = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


@dataclass(frozen=True)
class Piece(Shard):
    """This rank's row of the numbers of a tensor.

    Attributes:
        parameter: that ZeRO 3 has cut up, if this is its row.
    """

    parameter: Any = None

    def take(self, other: Shard) -> None:
        """Copy the values of another one. A parameter that is whole at the moment is gathered anew at its next use."""
        self.part.copy_(other.part)
        if self.parameter is not None and self.parameter.ds_status.name == "AVAILABLE":
            self.parameter.partition()

    def full_tensor(self) -> torch.Tensor:
        """The whole tensor, in host memory of the first rank of each machine; others get an empty one.

        Must be called by all ranks. Each needs memory on its device for this one tensor.
        """
        device = torch.accelerator.current_accelerator() if dist.get_backend() == "nccl" else torch.device("cpu")
        whole = torch.zeros(self.shape.numel(), dtype=self.part.dtype, device=device)
        if not self.is_replica:
            whole[slice(*self.place[0])].copy_(self.part)
        dist.all_reduce(whole)  # every number is on one rank, and 0 on the others
        is_first = os.environ.get("LOCAL_RANK", "0") == "0"
        return whole.view(self.shape).cpu() if is_first else whole.new_empty(0, device="cpu")


@dataclass(frozen=True)
class Row:
    """Where a part of a parameter is.

    Attributes:
        parameter: of the model.
        start: the number of the part's first element in the parameter.
        offset: the number of that element in the tensor that the optimizer updates.
        count: of elements; this rank may have none.
    """

    parameter: Any
    start: int
    offset: int
    count: int

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        """The part of a tensor like the one that the optimizer updates. Not a copy."""
        return flat.view(-1)[self.offset : self.offset + self.count]

    def part_of(self, value: torch.Tensor | Shard) -> torch.Tensor:
        """The part of a tensor like the whole parameter, or of this rank's piece of it. Not a copy of the latter."""
        return value.part if isinstance(value, Shard) else value.reshape(-1)[self.start : self.start + self.count]

    @property
    def shape(self) -> torch.Size:
        """Of the whole parameter."""
        return getattr(self.parameter, "ds_shape", self.parameter.shape)  # type: ignore[no-any-return]

    def piece(self, flat: torch.Tensor, *, is_replica: bool = False) -> Piece:
        """`of`, with its place."""
        return Piece(self.shape, [(self.start, self.start + self.count)], self.of(flat), is_replica)


Layout = list[tuple[torch.Tensor, list[Row]]]
"""The tensors that an optimizer updates on this rank, with the parts of parameters that are in them."""


def piece_of(parameter: Any) -> Piece:
    """This rank's part of a parameter that ZeRO 3 has cut up into equal rows, of which the last may be longer."""
    return replace(_row_of_stage_3(parameter).piece(parameter.ds_tensor.detach()), parameter=parameter)


def layout_of(engine: Any, groups: list[list[Any]]) -> Layout:
    """What the optimizer of an engine updates on this rank.

    Args:
        engine: of DeepSpeed.
        groups: the parameters of each group.
    """
    outer, inner = engine.optimizer, engine.basic_optimizer
    if hasattr(outer, "fp32_partitioned_groups_flat"):  # stage 3
        return [
            (flat, list(map(_row_of_stage_3, group, _offsets(each.partition_numel() for each in group))))
            for flat, group in zip(outer.fp32_partitioned_groups_flat, outer.fp16_groups, strict=True)
        ]
    layout: Layout = []
    for parameters, group in zip(groups, inner.param_groups, strict=True):
        own, flats = [each for each in parameters if each.requires_grad], group["params"]
        if any(hasattr(each, "_hp_mapping") for each in own):  # stages 1 and 2
            layout.append((flats[0], [_row_of_mapping(each) for each in own]))
        elif len(flats) == len(own):
            layout += [(flat, [Row(each, 0, 0, each.numel())]) for each, flat in zip(own, flats, strict=True)]
        else:  # float16 with DeepSpeed's own Adam
            offsets = _offsets(each.numel() for each in own)
            layout.append((flats[0], [Row(each, 0, at, each.numel()) for each, at in zip(own, offsets, strict=False)]))
    return layout


def _row_of_mapping(parameter: Any) -> Row:
    mapping = parameter._hp_mapping
    if mapping is None:  # other ranks have all of it
        return Row(parameter, 0, 0, 0)
    place = mapping.hp_fragment_address
    return Row(parameter, mapping.lp_fragment_address.start, place.start, place.numel)


def _offsets(sizes: Iterable[int]) -> Iterable[int]:
    return itertools.accumulate(sizes, initial=0)


def _row_of_stage_3(parameter: Any, offset: int = 0) -> Row:
    size = parameter.partition_numel()
    start = min(dist.get_rank() * size, parameter.ds_numel)
    return Row(parameter, start, offset, min(size, parameter.ds_numel - start))


def norm_of(engine: Any, scale: float) -> torch.Tensor | None:
    """The norm of the gradient of the last update before clipping; None if the engine did not compute one.

    Args:
        engine: of DeepSpeed.
        scale: the loss scale of that update. ZeRO 3 divides by that of the next one.
    """
    norm = engine.get_global_grad_norm()
    if norm is None:
        return None
    is_of_next = hasattr(engine.optimizer, "fp32_partitioned_groups_flat")
    return torch.as_tensor(norm) * (engine.optimizer.loss_scale / scale if is_of_next else 1.0)


def scale_of(outer: Any) -> Any:
    """What keeps the loss scale of an engine's optimizer; None if there is none."""
    return getattr(outer, "loss_scaler", None) or getattr(outer, "loss_scale_config", None)
