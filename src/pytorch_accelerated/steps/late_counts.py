"""Numbers of items that are known only during an update, because a hook returns `num_items_in_batch`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from pytorch_accelerated.errors import DataError, HookOutputError
from pytorch_accelerated.processes.ranks import Ranks
from pytorch_accelerated.tracking.loss import widest_float


class LateCounts:
    """Weights the batches of an update by their items, although the total is known only after the last batch.

    Each loss is multiplied by its items divided by `reference`, a number that all ranks share; the rest is one factor
    for all gradients. Counts are summed as integers, or in double precision if they are tensors.

    Args:
        ranks: the processes.

    Attributes:
        counts: the counts of the update's batches so far.
        hook_counts: whether the hook returns `num_items_in_batch`; None before the first batch.
        are_pending: whether the update needs `take_factor`: it has counts, or the ranks have not agreed yet that all of
            their hooks count, or none.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self.counts: list[Any] = []
        self._reference = 1.0
        self._are_tensors = False  # on any rank
        self._is_agreed = self._ranks.count == 1
        self.are_pending = not self._is_agreed
        self.hook_counts: bool | None = None

    def check(self, output: Mapping[str, Any]) -> bool:
        """Whether the hook has counted the items of a batch.

        Raises:
            HookOutputError: if it counts only some batches, so that no common weight exists.
        """
        counts = output.get("num_items_in_batch") is not None
        if self.hook_counts is None:
            self.hook_counts = counts
        elif self.hook_counts is not counts:
            raise _only_some("for some batches only")
        return counts

    def add(self, count: Any, samples: int) -> Any:
        """Add the items of a batch. Returns the factor for its mean loss.

        Args:
            count: the count of this rank's batch.
            samples: the samples of the whole update, on all ranks: weights are near 1 if it has about as many items.
        """
        self.counts.append(count)
        self.are_pending = True
        self._reference = max(1.0, samples / self._ranks.count)
        if isinstance(count, torch.Tensor):
            return count.detach().reshape(()).to(widest_float(count.device)) / self._reference
        return count / self._reference

    def forget(self) -> None:
        """Forget the counts, because the update is computed again."""
        self.counts.clear()
        self.are_pending = not self._is_agreed

    def _agree(self) -> None:
        """Agree, after the first update, whether the hooks of all ranks count. Must be called by all ranks.

        Raises:
            HookOutputError: if only some ranks count, so that the others would not take part in the sum.
        """
        are_tensors = any(isinstance(count, torch.Tensor) for count in self.counts)
        counting, tensors = zip(*self._ranks.exchange_numbers([bool(self.hook_counts), are_tensors]), strict=True)
        if len(set(counting)) > 1:
            raise _only_some(f"on rank {', '.join(str(rank) for rank, counts in enumerate(counting) if counts)} only")
        self._are_tensors, self._is_agreed = any(tensors), True

    def take_factor(self) -> float | None:
        """The factor for all gradients, or None without counts; forgets the update. Must be called by all ranks.

        Waits for the device if counts are tensors: an update without items must be detected before the optimizer steps,
        since its momentum and weight decay change the weights even if the gradient is zero.

        Raises:
            DataError: on all ranks, if the update has no items.
            HookOutputError: if only some ranks count.
        """
        if not self._is_agreed:
            self._agree()
        total = self._total() if self.counts else None
        self.forget()
        if total is None:
            return None
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
