"""Batches from host memory to the device, ahead of their use."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch

from pytorch_accelerated.trees import leaves


class DeviceFeed(Protocol):
    """Takes host batches, in order, and gives them back on the trainer's device."""

    def __call__(self, batches: Iterator[Any], /) -> Iterator[Any]: ...


def device_feed(device: torch.device, move: Callable[..., Any]) -> DeviceFeed:
    """The way of batches to `device`.

    On the CPU they are where they belong. For CUDA the copy of the next batch runs on a stream of its own while the
    current one is computed with. For other devices each batch is copied when it is asked for.

    Args:
        device: of the trainer.
        move: ``move(batch, device, non_blocking=True)`` returns the batch with its tensors on `device`.
    """
    if device.type == "cpu":
        return _as_they_are
    if device.type == "cuda":
        return _CudaFeed(device, move)
    return lambda batches: (move(batch, device, non_blocking=True) for batch in batches)


def _as_they_are(batches: Iterator[Any]) -> Iterator[Any]:
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
                    # Its memory belongs to the other stream, which must not give it away before this one has used it.
                    tensor.record_stream(current)
            ahead = self._copy_next(batches, self._stream)
            yield batch

    def _copy_next(
        self, batches: Iterator[Any], stream: torch.cuda.Stream
    ) -> tuple[Any, torch.cuda.Event | None] | None:
        for batch in batches:
            if _tensors_in(batch) is None:  # copied on the stream that uses it
                return self._move(batch, self._device, non_blocking=True), None
            with torch.cuda.stream(stream):
                moved = self._move(batch, self._device, non_blocking=True)
                return moved, stream.record_event()
        return None


def _tensors_in(batch: Any) -> list[torch.Tensor] | None:
    """The tensors of a batch; None if there is an object in it that can be moved, but not looked into."""
    movable = [leaf for leaf in leaves(batch) if hasattr(leaf, "to")]
    return movable if all(isinstance(leaf, torch.Tensor) for leaf in movable) else None


class WaitingTime:
    """Sums up how long host batches had to be waited for.

    Attributes:
        seconds: since the object was made.
    """

    def __init__(self) -> None:
        self.seconds = 0.0

    def over(self, batches: Iterator[Any]) -> Iterator[Any]:
        """The same batches; the time each takes to come is added."""
        clock = time.perf_counter
        while True:
            asked = clock()
            try:
                batch = next(batches)
            except StopIteration:
                return
            finally:
                self.seconds += clock() - asked
            yield batch
