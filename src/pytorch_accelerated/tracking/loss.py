"""The mean loss of an epoch, kept where the losses are and read in bulk."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


class LossTracker:
    """A weighted mean of batch losses that does not wait for the device until somebody reads it.

    `update` only puts the loss into a list. Reading (any property, or `read`) stacks what has come since the last
    time, adds it to sums in double precision and copies everything to the host in one transfer.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget everything."""
        self._pending_losses: list[Any] = []
        self._pending_weights: list[Any] = []
        self._batches_read = 0
        self._total = 0.0
        self._count = 0.0
        self._last = 0.0
        self.first_non_finite: int | None = None

    def update(self, loss_batch_value: torch.Tensor | float, batch_size: Any = 1) -> None:
        """Take in the mean loss of a batch.

        Args:
            loss_batch_value: a number or a tensor with one element, on any device.
            batch_size: its weight, the number of items the mean was taken over; a number or a 0-dim tensor.
        """
        if isinstance(loss_batch_value, torch.Tensor):
            loss_batch_value = loss_batch_value.detach()  # else the list would keep the graph alive
        self._pending_losses.append(loss_batch_value)
        self._pending_weights.append(batch_size)

    def read(self) -> None:
        """Add what is pending to the sums. Waits for the device once, if anything is pending."""
        if not self._pending_losses:
            return
        total, count, last, first_non_finite = _summarise(self._pending_losses, self._pending_weights)
        self._total += total
        self._count += count
        self._last = last
        self._note_non_finite(first_non_finite)
        self._batches_read += len(self._pending_losses)
        self._pending_losses.clear()
        self._pending_weights.clear()

    def look_for_non_finite(self) -> None:
        """Set `first_non_finite` as `read` would, but leave what is pending as it is. Waits for the device.

        Where a sum is cut changes its last bit. Looking in between, as before a save, must not.
        """
        if self._pending_losses:
            self._note_non_finite(_summarise(self._pending_losses, self._pending_weights)[3])

    def _note_non_finite(self, pending_index: float) -> None:
        if self.first_non_finite is None and pending_index >= 0:
            self.first_non_finite = self._batches_read + int(pending_index)

    def peek(self) -> float | None:
        """The mean so far, or None before the first batch; leaves what is pending as it is. Waits for the device."""
        total, count = self._total, self._count
        if self._pending_losses:
            new_total, new_count, _, _ = _summarise(self._pending_losses, self._pending_weights)
            total, count = total + new_total, count + new_count
        return total / count if count else None

    @property
    def average(self) -> float:
        """The mean loss per item, 0.0 before the first batch."""
        self.read()
        return self._total / self._count if self._count else 0.0

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
        """The sums so far and what is pending, as plain values. Waits for the device."""
        return {
            "pending_losses": _to_numbers(self._pending_losses),
            "pending_weights": _to_numbers(self._pending_weights),
            "total": self._total,
            "count": self._count,
            "last": self._last,
            "batches_read": self._batches_read,
            "first_non_finite": self.first_non_finite,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what `state_dict` returned."""
        self.reset()
        self._pending_losses = list(state["pending_losses"])
        self._pending_weights = list(state["pending_weights"])
        self._total, self._count, self._last = state["total"], state["count"], state["last"]
        self._batches_read, self.first_non_finite = state["batches_read"], state["first_non_finite"]

    def add_state_dict(self, state: dict[str, Any]) -> None:
        """Take in what another tracker had, of a rank that is no longer there."""
        other = LossTracker()
        other.load_state_dict(state)
        self._total += other.total_loss
        self._count += other.running_count
        self._last = other.loss_value
        self._batches_read = max(self._batches_read, other._batches_read)
        if self.first_non_finite is None:
            self.first_non_finite = other.first_non_finite


def _summarise(losses: Sequence[Any], weights: Sequence[Any]) -> list[float]:
    """Weighted sum, sum of weights, last loss and index of the first non-finite one (-1: none), in one transfer."""
    device = _device_of(losses)
    values = _stack(losses, device)
    shares = _stack(weights, device)
    bad = ~torch.isfinite(values)
    first_bad = torch.where(bad.any(), bad.to(torch.uint8).argmax(), -1)
    # A weight of 0 leaves a batch out, whatever its loss: 0 * nan would not.
    total = torch.where(shares == 0, torch.zeros_like(values), values * shares).sum()
    return torch.stack([total, shares.sum(), values[-1], first_bad.to(values.dtype)]).tolist()


def _to_numbers(values: Sequence[Any]) -> list[float]:
    """In one transfer, and exactly: every loss dtype fits into a Python float."""
    return _stack(values, _device_of(values)).tolist()


def _device_of(values: Sequence[Any]) -> torch.device:
    return next((value.device for value in values if isinstance(value, torch.Tensor)), torch.device("cpu"))


def _stack(values: Sequence[Any], device: torch.device) -> torch.Tensor:
    # Devices without double precision sum in single.
    dtype = torch.float32 if device.type == "mps" else torch.float64
    if not any(isinstance(value, torch.Tensor) for value in values):
        return torch.tensor(values, dtype=dtype, device=device)
    try:
        stacked = torch.stack(list(values))  # of one shape and on one device, as nearly always
    except (TypeError, RuntimeError):
        stacked = torch.stack([torch.as_tensor(value, dtype=dtype, device=device).reshape(()) for value in values])
    return stacked.reshape(-1).to(device=device, dtype=dtype)
