"""Copies batches from host memory to the device, ahead of their use."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from pytorch_accelerated.trees import leaves

# Takes host batches and yields them on the trainer's device, in the same order.
DeviceFeed = Callable[[Iterator[Any]], Iterator[Any]]


def device_feed(device: torch.device, move: Callable[..., Any]) -> DeviceFeed:
    """The `DeviceFeed` for `device`, where ``move(batch, device, non_blocking=True)`` returns the batch on the device.

    On the CPU it does nothing. On CUDA the next batch is copied on a separate stream while the current one is in use.
    On other devices each batch is copied when it is requested.
    """
    if device.type == "cpu":
        return _unchanged
    if device.type == "cuda":
        return _CudaFeed(device, move)
    return lambda batches: (move(batch, device, non_blocking=True) for batch in batches)


def _unchanged(batches: Iterator[Any]) -> Iterator[Any]:
    return batches


class _CudaFeed:
    """Copies one batch ahead."""

    def __init__(self, device: torch.device, move: Callable[..., Any]) -> None:
        self._device = device
        self._move = move
        self._stream: torch.cuda.Stream | None = None

    def __call__(self, batches: Iterator[Any]) -> Iterator[Any]:
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        ahead = self._copy_next(batches, self._stream)
        while ahead is not None:
            batch, copied = ahead
            if copied is not None:
                current = torch.cuda.current_stream(self._device)
                current.wait_event(copied)  # the stream waits, the host does not
                for tensor in _tensors_in(batch) or ():
                    # The other stream owns the memory and must not reuse it before this stream has finished with it.
                    tensor.record_stream(current)
            ahead = self._copy_next(batches, self._stream)
            yield batch

    def _copy_next(
        self, batches: Iterator[Any], stream: torch.cuda.Stream
    ) -> tuple[Any, torch.cuda.Event | None] | None:
        for batch in batches:
            if _tensors_in(batch) is None:  # copy it on the current stream
                return self._move(batch, self._device, non_blocking=True), None
            with torch.cuda.stream(stream):
                moved = self._move(batch, self._device, non_blocking=True)
                return moved, stream.record_event()
        return None


def _tensors_in(batch: Any) -> list[torch.Tensor] | None:
    """The tensors of a batch; None if it contains an opaque object that can be moved."""
    movable = [leaf for leaf in leaves(batch) if hasattr(leaf, "to")]
    return movable if all(isinstance(leaf, torch.Tensor) for leaf in movable) else None


class WaitingTime:
    """Adds up the time that a run waits for host batches.

    Attributes:
        seconds: the total.
    """

    def __init__(self) -> None:
        self.seconds = 0.0

    def over(self, batches: Iterator[Any]) -> Iterator[Any]:
        """The same batches; adds the time that each of them takes."""
        clock = time.perf_counter
        asked = clock()
        for batch in batches:
            self.seconds += clock() - asked
            yield batch
            asked = clock()
        self.seconds += clock() - asked
