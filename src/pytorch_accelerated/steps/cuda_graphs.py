"""How something is captured on a device, to be done again without Python: with CUDA graphs."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol, TypeVar

import torch

Result = TypeVar("Result")


class Capturer(Protocol):
    """Captures what a function does on the device, to be done again without calling it."""

    def aside(self) -> contextlib.AbstractContextManager[None]:
        """Where everything that will be captured must run before."""

    def noting_waits(self) -> contextlib.AbstractContextManager[list[str]]:
        """Yields a list that has, afterwards, the places where the host waited for the device meanwhile."""

    def capture(
        self, function: Callable[[], Result], generators: Iterable[torch.Generator]
    ) -> tuple[Result, Callable[[], None]]:
        """What `function` returns, and a function that computes it again into the same tensors.

        Args:
            function: reads and writes tensors that stay where they are.
            generators: those that it may draw from, besides the device's own.
        """


class CudaGraphCapturer:
    """Captures CUDA graphs, which share one pool of memory.

    Args:
        device: the CUDA device that everything is on.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """On the stream that captures use. What comes after waits for it on the device, not on the host."""
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            current.wait_stream(self._stream)

    @contextlib.contextmanager
    def noting_waits(self) -> Iterator[list[str]]:
        """Waits that torch knows of. A capture would fail at them, and torch does not get over that completely."""
        places: list[str] = []
        mode = torch.cuda.get_sync_debug_mode()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                yield places
            finally:
                torch.cuda.set_sync_debug_mode(mode)
        places += [
            f"{warning.filename}, line {warning.lineno}"
            for warning in caught
            if "synchronizing CUDA operation" in str(warning.message)
        ]

    def capture(
        self, function: Callable[[], Result], generators: Iterable[torch.Generator]
    ) -> tuple[Result, Callable[[], None]]:
        """Capture a graph. Nothing is computed before its first replay."""
        generators = tuple(generators)
        graph = torch.cuda.CUDAGraph()
        for generator in generators:
            graph.register_generator_state(generator)
        # Other threads, such as those that pin batches, may go on allocating.
        capturing = torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode="thread_local")
        try:
            # If the capture fails, only the outer context puts the current stream back.
            with torch.cuda.stream(self._stream), capturing:
                result = function()
        except BaseException:
            self._recover(generators)
            raise
        return result, graph.replay

    def _recover(self, generators: Iterable[torch.Generator]) -> None:
        """After a failed capture torch takes generators and the allocator for still being in it."""
        index = torch.cuda.current_device() if self._device.index is None else self._device.index
        for generator in (torch.cuda.default_generators[index], *generators):
            generator.graphsafe_set_state(generator.clone_state())
        for finish in ("_cuda_endAllocateToPool", "_cuda_releasePool"):
            with contextlib.suppress(AttributeError, RuntimeError):  # some versions of torch have done it by now
                getattr(torch._C, finish)(index, self._pool)
