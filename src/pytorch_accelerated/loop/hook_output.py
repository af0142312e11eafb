"""What a hook of a batch returns: its loss, and the number of items that the loss is the mean of."""

from __future__ import annotations

import numbers
from collections.abc import Mapping
from typing import Any

import torch

from pytorch_accelerated.errors import DataError, HookOutputError
from pytorch_accelerated.ranks.ranks import Ranks
from pytorch_accelerated.record.loss import widest_float


def loss_and_size(output: Any, *, hook: str) -> tuple[Any, Any]:
    """The loss that a hook returned, and the number of items that it is the mean of.

    Raises:
        HookOutputError: if one of them is missing or unusable.
    """
    is_mapping = isinstance(output, (dict, Mapping))  # of a dict, the first answers at once
    if not is_mapping or "loss" not in output or "batch_size" not in output:
        entries = f" with {', '.join(map(repr, output)) or 'nothing in it'}" if is_mapping else ""
        raise HookOutputError(
            f"`{hook}` returned a {type(output).__name__}{entries}: give a dict with 'loss' and 'batch_size'."
        )
    loss, size = output["loss"], output["batch_size"]
    count = output.get("num_items_in_batch")
    if count is not None:
        size = count
    if not (isinstance(loss, torch.Tensor) and loss.ndim == 0) and not _is_one_number(loss):
        raise HookOutputError(
            f"`{hook}` returned {_described(loss)} as 'loss', but the loop needs the mean over the batch, one number. "
            "Return a tensor with one element, for example with `.mean()` in the hook or the loss function."
        )
    # Reading a tensor would wait for the device.
    if size < (count is None) if type(size) is int else not _is_one_number(size):
        name = "batch_size" if count is None else "num_items_in_batch"
        shown = size if type(size) is int else _described(size)
        raise HookOutputError(
            f"`{hook}` returned {shown} as {name!r}: return the number of items that the loss is the mean of. A batch "
            "without rows has no mean: where a `collate_fn` leaves out rows, leave out such batches, too."
        )
    return loss, size


def adding_nothing(loss: Any) -> Any:
    """A loss of 0 whose backward pass reaches everything that `loss` was computed from and adds exactly nothing.

    Other ranks wait for that backward pass. A mean over no items is 0 / 0, and its gradient is NaN even when multiplied
    by 0.
    """
    found, nodes = set(), [getattr(loss, "grad_fn", None)]
    while nodes:
        node = nodes.pop()
        if node is not None and node not in found:
            found.add(node)
            node.register_hook(_zeros)
            nodes.extend(before for before, _ in node.next_functions)
    return (loss * 0.0).nan_to_num(0.0)


def _zeros(gradients: tuple[torch.Tensor | None, ...], _: Any) -> tuple[torch.Tensor | None, ...]:
    return tuple(None if gradient is None else torch.zeros_like(gradient) for gradient in gradients)


def _is_one_number(value: Any) -> bool:
    """Whether `value` is a number, or a tensor with one element. Does not wait for the device."""
    if isinstance(value, torch.Tensor):
        return value.ndim == 0 or value.numel() == 1
    return isinstance(value, numbers.Real)


def _described(value: Any) -> str:
    shape = f" of shape {list(value.shape)}" if isinstance(value, torch.Tensor) else ""
    return f"{'None' if value is None else f'a {type(value).__name__}'}{shape}"


class LateCounts:
    """Weights the batches of an update by their items, although the total is known only after the last batch.

    Each loss is multiplied by its items divided by `reference`, a number that all ranks share; the rest is one factor
    for all gradients. Counts are summed as integers, or in double precision if they are tensors.

    Args:
        ranks: the processes.
        mean_is_over: by how much gradients are divided when they are joined.

    Attributes:
        counts: the counts of the update's batches so far.
        hook_counts: whether the hook returns `num_items_in_batch`; None before the first batch.
        are_pending: whether the update needs `take_factor`: it has counts, or the ranks have not agreed yet that all of
            their hooks count, or none.
    """

    def __init__(self, ranks: Ranks, *, mean_is_over: int) -> None:
        self._ranks, self._mean_is_over = ranks, mean_is_over
        self.counts: list[Any] = []
        self._reference = 1.0
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
        self._reference = max(1.0, samples / self._mean_is_over)
        if isinstance(count, torch.Tensor):
            return count.detach().reshape(()).to(widest_float(count.device)) / self._reference
        return count / self._reference

    def _agree(self) -> None:
        """Agree, after the first update, whether the hooks of all ranks count. Must be called by all ranks.

        Raises:
            HookOutputError: if only some ranks count, so that the others would not take part in the sum.
        """
        counting = [counts for (counts,) in self._ranks.exchange_numbers([bool(self.hook_counts)])]
        if len(set(counting)) > 1:
            raise _only_some(f"on rank {', '.join(str(rank) for rank, counts in enumerate(counting) if counts)} only")
        self._is_agreed = True

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
        self.counts.clear()
        self.are_pending = not self._is_agreed
        if total is None:
            return None
        if total == 0:
            raise DataError(
                "An update has no items at all: `num_items_in_batch` was 0 for each of its batches, on all ranks, so "
                "its loss has no mean. Nothing was changed by it; leave such batches out of the dataset."
            )
        return self._mean_is_over * self._reference / total

    def _total(self) -> float:
        numbers: Any = sum(count for count in self.counts if not isinstance(count, torch.Tensor))
        device = self._ranks.device
        on_device = [
            count.detach().reshape(()).to(device=device, dtype=widest_float(device))
            for count in self.counts
            if isinstance(count, torch.Tensor)
        ]
        own = numbers + (sum(on_device).item() if on_device else 0)  # type: ignore[union-attr]
        return own if self._ranks.count == 1 else self._ranks.sum([own])[0]


def _only_some(which: str) -> HookOutputError:
    return HookOutputError(
        f"`calculate_train_batch_loss` returned 'num_items_in_batch' {which}. Return it always, or never."
    )
