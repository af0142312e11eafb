"""Rows on their way from a device to host memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from pytorch_accelerated.trees import map_leaves

Rows = dict[str, Any]


class ArrivingRows:
    """Copies batches to host memory and hands them on, in order.

    Copies off a CUDA device run while the device computes; the host waits for them only when more batches have come,
    whose work is then queued on the device already.

    Args:
        take: called with each batch, whose tensors are in host memory then; other objects are as they were.
        batches_on_device: number of batches that stay on the device until they are copied together.
        keeps_rows: whether `take` keeps the tensors. Then they get pageable memory that belongs to nobody else.
    """

    def __init__(self, take: Callable[[Rows], None], *, batches_on_device: int = 1, keeps_rows: bool = False) -> None:
        self._take = take
        self._batches_on_device = batches_on_device
        self._keeps_rows = keeps_rows
        self._on_device: list[Rows] = []
        self._copies: list[Rows] = []
        self._arrivals: list[torch.cuda.Event] = []

    def add(self, rows: Rows) -> None:
        self._on_device.append(rows)
        if len(self._on_device) >= self._batches_on_device:
            self._start_copies()

    def finish(self) -> None:
        self._start_copies()
        self._hand_on()

    def _start_copies(self) -> None:
        batches, self._on_device = self._on_device, []
        devices = {
            leaf.device for rows in batches for leaf in rows.values() if isinstance(leaf, torch.Tensor) and leaf.is_cuda
        }
        # Rows in host memory must be copied too if they have to wait for others: their owner may reuse the memory.
        must_copy = self._keeps_rows or bool(devices)
        copies = [{path: _on_host(leaf, must_copy) for path, leaf in rows.items()} for rows in batches]
        arrivals = [torch.cuda.current_stream(device).record_event() for device in devices]
        self._hand_on()
        self._copies, self._arrivals = copies, arrivals
        if not arrivals:
            self._hand_on()

    def _hand_on(self) -> None:
        """Wait for the copies on their way, if there are any, and hand them on."""
        for arrival in self._arrivals:
            arrival.synchronize()
        is_pinned = bool(self._arrivals)
        batches, self._copies, self._arrivals = self._copies, [], []
        for rows in batches:
            self._take(map_leaves(_copied, rows) if is_pinned and self._keeps_rows else rows)


def _on_host(leaf: Any, must_copy: bool) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    # On the way from a CUDA device torch puts the copy into pinned memory.
    return leaf.detach().to("cpu", non_blocking=leaf.is_cuda, copy=must_copy)


def _copied(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, torch.Tensor) else leaf
