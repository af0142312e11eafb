"""Items of an update that are known only while it runs, because a hook returns `num_items_in_batch`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from pytorch_accelerated.errors import DataError, HookOutputError
from pytorch_accelerated.processes.ranks import Ranks
from pytorch_accelerated.tracking.loss import widest_float


class LateCounts:
    """Scales the batches of an update by their items, though their total is known only after the last of them.

    Each loss is multiplied by its items over `reference`, a number that all ranks share; what is missing then is one
    factor for all gradients. Counts are added up as integers, or in double precision where they are tensors.

    Args:
        ranks: the processes.

    Attributes:
        counts: of the batches of the update so far.
        hook_counts: whether the hook returns `num_items_in_batch`; None before the first batch.
        is_agreed: whether all ranks know that their hooks do alike.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self.counts: list[Any] = []
        self._reference = 1.0
        self._are_tensors = False  # on any rank
        self.is_agreed = ranks.count == 1
        self.hook_counts: bool | None = None

    def check(self, output: Mapping[str, Any]) -> bool:
        """Whether the hook has counted the items of a batch.

        Raises:
            HookOutputError: if it does so for some batches only: nothing could be weighted by both.
        """
        counts = output.get("num_items_in_batch") is not None
        if self.hook_counts is None:
            self.hook_counts = counts
        elif self.hook_counts is not counts:
            raise _only_some("for some batches only")
        return counts

    def add(self, count: Any, samples: int) -> Any:
        """Take in the items of a batch. Returns what its mean loss is to be multiplied by.

        Args:
            count: of this rank's batch.
            samples: of the whole update, on all ranks: the weights are near 1 if it has about as many items.
        """
        self.counts.append(count)
        self._reference = max(1.0, samples / self._ranks.count)
        if isinstance(count, torch.Tensor):
            return count.detach().reshape(()).to(widest_float(count.device)) / self._reference
        return count / self._reference

    def forget(self) -> None:
        """Forget the counts: the update is computed again."""
        self.counts.clear()

    def agree(self) -> None:
        """At the end of the first update: do the hooks of all ranks count? Must be called by all ranks.

        Raises:
            HookOutputError: if those of some ranks do, so that the others would not take part in adding up.
        """
        are_tensors = any(isinstance(count, torch.Tensor) for count in self.counts)
        counting, tensors = zip(*self._ranks.exchange_numbers([bool(self.hook_counts), are_tensors]), strict=True)
        if len(set(counting)) > 1:
            raise _only_some(f"on rank {', '.join(str(rank) for rank, counts in enumerate(counting) if counts)} only")
        self._are_tensors, self.is_agreed = any(tensors), True

    def take_factor(self) -> float:
        """What all gradients are to be multiplied by; forgets the update. Must be called by all ranks.

        Waits for the device if counts are tensors: an update without items must be known before the optimizer steps,
        since its momentum and weight decay change the weights even where the gradient is zero.

        Raises:
            DataError: on all ranks, if the update has no items.
        """
        total = self._total()
        self.counts.clear()
        if total == 0:
            raise DataError(
                "An update has no items at all: `num_items_in_batch` was 0 for each of its batches, on all ranks. A "
                "mean over nothing is not defined, and nothing was changed by this update; leave such batches out of "
                "the dataset."
            )
        return self._ranks.count * self._reference / total

    def _total(self) -> float:
        numbers: Any = sum(count for count in self.counts if not isinstance(count, torch.Tensor))
        device = self._ranks.device
        on_device = [
            count.detach().reshape(()).to(device=device, dtype=widest_float(device))
            for count in self.counts
            if isinstance(count, torch.Tensor)
        ]
        if self._are_tensors:
            number = torch.tensor(float(numbers), dtype=widest_float(device), device=device)
            return self._ranks.sum_on_device(sum(on_device, number)).item()
        own = numbers + (sum(on_device).item() if on_device else 0)  # type: ignore[union-attr]
        return own if self._ranks.count == 1 else self._ranks.sum([own])[0]


def _only_some(which: str) -> HookOutputError:
    return HookOutputError(
        f"`calculate_train_batch_loss` returned 'num_items_in_batch' {which}, so the batches of an update could not be "
        "weighted by one thing. Return it always, or never."
    )
