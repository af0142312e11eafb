"""The mean loss of an epoch: losses stay on their device and are read in bulk."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

Numbers = np.ndarray[Any, np.dtype[np.float64]]
_MANY_LOSSES = 256


class LossTracker:
    """A weighted mean of batch losses that does not wait for the device until it is read.

    `update` only appends the loss to a list. Reading (any property, or `read`) copies the pending losses to the host in
    one transfer, and adds them to sums in double precision.

    `end_part` divides the losses into parts that have sums of their own. They do not change how the mean is summed.

    Args:
        leaves_out_non_finite: whether losses that are NaN or infinite are ignored and not reported.

    Attributes:
        batches_read: the number of losses in the sums.
    """

    def __init__(self, *, leaves_out_non_finite: bool = False) -> None:
        self.leaves_out_non_finite = leaves_out_non_finite
        self.reset()

    def reset(self) -> None:
        """Discard all losses."""
        self._pending_losses: list[Any] = []
        self._pending_weights: list[Any] = []
        self.batches_read = 0
        self._total = 0.0
        self._count = 0.0
        self._last = 0.0
        self.first_non_finite: int | None = None
        # End offsets of parts that are not summed yet, in losses since the beginning.
        self._part_ends: list[int] = []
        self._part_start = 0
        self._part_read = (0.0, 0.0)  # what has been read of the part that has not ended
        self._parts: list[tuple[float, float]] = []

    def update(self, loss_batch_value: torch.Tensor | float, batch_size: Any = 1) -> None:
        """Add the mean loss of a batch.

        Args:
            loss_batch_value: a number or a tensor with one element, on any device.
            batch_size: its weight, the number of items in the mean; a number or a 0-dim tensor.
        """
        if isinstance(loss_batch_value, torch.Tensor):
            loss_batch_value = loss_batch_value.detach()  # otherwise the list would keep the graph alive
        self._pending_losses.append(loss_batch_value)
        self._pending_weights.append(batch_size)

    def end_part(self) -> None:
        """End a part after the latest loss."""
        self._part_ends.append(self.batches_read + len(self._pending_losses))

    def take_parts(self) -> list[tuple[float, float]]:
        """The sum of losses times weights, and the sum of weights, of each part that has ended since the last call.

        Waits for the device if there are pending losses in them, which stay pending.
        """
        if self._part_ends:
            with np.errstate(all="ignore"):  # as in `read`
                _, weighted, weights = self._pending_numbers()
                self._sum_parts(weighted, weights, is_last=False)
        parts, self._parts = self._parts, []
        return parts

    def read(self) -> None:
        """Add pending losses to the sums. Waits for the device once if there are any."""
        if not self._pending_losses:
            return
        with np.errstate(all="ignore"):  # non-finite losses are reported through their index
            losses, weighted, weights = self._pending_numbers()
            self._sum_parts(weighted, weights, is_last=True)
            counted = weights != 0
            self._total += float((weighted if counted.all() else weighted[counted]).sum())
        self._count += float(weights.sum())
        self._last = float(losses[-1])
        if not math.isfinite(self._total) and self.first_non_finite is None:
            bad = np.flatnonzero(~np.isfinite(losses) & counted)  # a mean of no items is NaN, which is not an error
            self.first_non_finite = self.batches_read + int(bad[0]) if len(bad) else None
        self.batches_read += len(self._pending_losses)
        self._pending_losses.clear()
        self._pending_weights.clear()

    def read_if_long(self) -> None:
        """Read the losses if there are many: each one that is pending takes memory of its device."""
        if len(self._pending_losses) >= _MANY_LOSSES:
            self.read()

    def look_for_non_finite(self) -> None:
        """Set `first_non_finite` like `read`, but keep pending losses pending. Waits for the device.

        The last bit of a sum depends on where it is divided, so a look before a save must not add anything to it.
        """
        looked_at = self.copy()
        looked_at.read()
        self.first_non_finite = looked_at.first_non_finite

    def _pending_numbers(self) -> tuple[Numbers, Numbers, Numbers]:
        """Pending losses, the same times their weights, and the weights, in one transfer.

        A weight of 0 leaves a batch out, whatever its loss: 0 times NaN would not.
        """
        losses, weights = _to_numbers(self._pending_losses, self._pending_weights)
        if self.leaves_out_non_finite:
            weights = np.where(np.isfinite(losses), weights, 0.0)
        weighted = losses * weights
        return losses, weighted if weights.all() else np.where(weights != 0, weighted, 0.0), weights

    def _sum_parts(self, weighted: Numbers, shares: Numbers, *, is_last: bool) -> None:
        starts = [max(0, self._part_start - self.batches_read), *(end - self.batches_read for end in self._part_ends)]
        # With one more 0, so that a part that begins after the last loss is empty too.
        numbers = np.zeros((2, len(weighted) + 1))
        numbers[0, :-1], numbers[1, :-1] = weighted, shares
        sums = np.add.reduceat(numbers, starts, axis=1)
        if len(set(starts)) < len(starts):
            sums[:, :-1][:, np.diff(starts) == 0] = 0.0  # of an empty part, `reduceat` returns the next number
        sums[:, 0] += self._part_read
        parts = list(map(tuple, sums.T.tolist()))
        self._parts += parts[:-1]
        if self._part_ends:
            self._part_start, self._part_read = self._part_ends[-1], (0.0, 0.0)
            self._part_ends.clear()
        if is_last:
            self._part_read = parts[-1]

    def copy(self) -> LossTracker:
        """An independent copy, which shares the losses. Does not wait for the device."""
        copied = copy.copy(self)
        for name, value in vars(self).items():
            if isinstance(value, list):
                setattr(copied, name, value.copy())
        return copied

    def peek(self) -> float | None:
        """The mean so far, or None before the first batch; keeps pending losses pending. Waits for the device."""
        copied = self.copy()
        copied.read()
        return copied._total / copied._count if copied._count else None

    @property
    def average(self) -> float:
        """The mean loss per item; 0.0 before the first batch, and NaN if all batches were left out."""
        self.read()
        if self._count == 0:
            return math.nan if self.leaves_out_non_finite and self.batches_read else 0.0
        return self._total / self._count

    @property
    def loss_value(self) -> float:
        """The loss of the last batch."""
        self.read()
        return self._last

    @property
    def total_loss(self) -> float:
        """The sum of the losses, each times its weight."""
        self.read()
        return self._total

    @property
    def running_count(self) -> float:
        """The sum of the weights."""
        self.read()
        return self._count

    def state_dict(self) -> dict[str, Any]:
        """The sums so far and the pending losses, as plain values. Waits for the device.

        Parts that have ended are not part of it: take them before.
        """
        losses, weights = _to_numbers(self._pending_losses, self._pending_weights)
        return {
            "pending_losses": losses.tolist(),
            "pending_weights": weights.tolist(),
            "total": self._total,
            "count": self._count,
            "last": self._last,
            "batches_read": self.batches_read,
            "first_non_finite": self.first_non_finite,
            "part_start": max(0, self._part_start - self.batches_read),
            "part_read": list(self._part_read),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the result of `state_dict`."""
        self.reset()
        self._pending_losses = list(state["pending_losses"])
        self._pending_weights = list(state["pending_weights"])
        self._total, self._count, self._last = state["total"], state["count"], state["last"]
        self.batches_read, self.first_non_finite = state["batches_read"], state["first_non_finite"]
        self._part_start = self.batches_read + state.get("part_start", 0)  # older states have no parts
        total, count = state.get("part_read", (0.0, 0.0))
        self._part_read = (total, count)

    def add_state_dict(self, state: dict[str, Any]) -> None:
        """Add the losses of another tracker, for ranks that no longer exist."""
        other = LossTracker(leaves_out_non_finite=self.leaves_out_non_finite)
        other.load_state_dict(state)
        self._total += other.total_loss
        self._count += other.running_count
        self._last = other.loss_value
        self._part_read = (self._part_read[0] + other._part_read[0], self._part_read[1] + other._part_read[1])
        self.batches_read = max(self.batches_read, other.batches_read)
        if self.first_non_finite is None:
            self.first_non_finite = other.first_non_finite


def _to_numbers(losses: Sequence[Any], weights: Sequence[Any]) -> tuple[Numbers, Numbers]:
    """Losses and weights as float64, in one transfer. This is exact: double precision includes every loss dtype."""
    device = next((value.device for value in (*losses, *weights) if isinstance(value, torch.Tensor)), None)
    if device is None:  # there is nothing to read, as for the gradient norms of a run that doesn't clip
        return np.array(losses, dtype=np.float64), np.array(weights, dtype=np.float64)
    rows = [stacked(losses, device)]
    if any(isinstance(weight, torch.Tensor) for weight in weights):
        rows.append(stacked(weights, device))
    numbers = np.array(torch.stack(rows).tolist(), dtype=np.float64)
    return numbers[0], numbers[1] if len(rows) > 1 else np.array(weights, dtype=np.float64)


def widest_float(device: torch.device) -> torch.dtype:
    """The most exact floating-point type of a device."""
    return torch.float32 if device.type == "mps" else torch.float64


def stacked(values: Sequence[Any], device: torch.device) -> torch.Tensor:
    """Numbers and tensors with one element as a tensor of the widest floating-point type of a device."""
    dtype = widest_float(device)
    if not any(isinstance(value, torch.Tensor) for value in values):
        return torch.tensor(values, dtype=dtype, device=device)
    try:
        stacked = torch.stack(list(values))  # nearly always, all have one shape and one device
    except (TypeError, RuntimeError):
        stacked = torch.stack([torch.as_tensor(value, dtype=dtype, device=device).reshape(()) for value in values])
    return stacked.reshape(-1).to(device=device, dtype=dtype)
