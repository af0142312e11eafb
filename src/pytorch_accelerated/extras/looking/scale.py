"""What a run would do on more processes than there are: computed, because order and shares are functions of numbers.

Torch's fake process group would count the same messages, but it has to be the group of the process, which may have one,
and the model would have to be wrapped again for each number of processes. The tests compare with real groups.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch

from pytorch_accelerated.data import PlannedLoader


@dataclasses.dataclass(frozen=True)
class ScaleFacts:
    """The same run on `processes` processes, as the process that computes it would be: each with the same batch size.

    Attributes:
        processes: how many.
        rows: of one epoch, by rank; None if the data has no known order.
        updates_per_epoch: None likewise.
        learning_rates: with which each update is made, one for each parameter group; empty without a scheduler.
        sent_bytes: what DDP gives the group on each rank in one update: all gradients, and the buffers of the model
            once. A ring of ranks sends up to twice as much.
        memory_bytes: of a rank that has the whole model: parameters, gradients, optimizer state, activations.
        sharded_memory_bytes: of the first rank if torch's `fully_shard` divides parameters, gradients and optimizer
            state; while a layer computes, its whole parameters come on top.
    """

    processes: int
    rows: tuple[int, ...] | None
    updates_per_epoch: int | None
    learning_rates: Sequence[tuple[float, ...]]
    sent_bytes: int
    memory_bytes: int
    sharded_memory_bytes: int


def size_of_parts(tensors: Sequence[torch.Tensor], processes: int) -> int:
    """The bytes that the first rank has of `tensors`, each divided along its first dimension; once each."""
    sizes = {
        id(each): -(-each.shape[0] // processes) * each[:1].numel() * each.element_size()
        if each.ndim and len(each)
        else each.numel() * each.element_size()
        for each in tensors
    }
    return sum(sizes.values())


def rows_and_updates(loader: Any, processes: int) -> tuple[tuple[int, ...], int] | tuple[None, None]:
    """The rows of each rank in an epoch, and the updates of the epoch; None where only the data knows."""
    if not isinstance(loader, PlannedLoader):
        return None, None
    rows, updates = [0] * processes, 0
    for window in loader.detached(SimpleNamespace(count=processes, index=0)).windows()[1]:
        updates += 1
        for cells in window.rounds:
            for rank, cell in enumerate(cells):
                rows[rank] += cell.size
    return tuple(rows), updates
