"""What CUDA graphs do, on the CPU: operations are recorded once with the tensors they used, then done again blindly."""

import contextlib
import traceback
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from pytorch_accelerated import Trainer
from pytorch_accelerated.steps.cuda_graphs import Capturer

READ = torch.ops.aten._local_scalar_dense.default


class TapeCapturer:
    """Captures a list of operations. A replay calls no Python function of the user's, and reads no number anew.

    Attributes:
        captures: how often something was captured.
        replays: how often something was replayed, the shadow steps included.
    """

    def __init__(self, *, notes_waits: bool = True) -> None:
        self.captures = 0
        self.replays = 0
        self.is_aside = False
        self._notes_waits = notes_waits

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        assert not self.is_aside
        self.is_aside = True
        try:
            yield
        finally:
            self.is_aside = False

    @contextlib.contextmanager
    def noting_waits(self) -> Iterator[list[str]]:
        assert self.is_aside
        places: list[str] = []
        with _NoteReads(places) if self._notes_waits else contextlib.nullcontext():
            yield places

    def capture(
        self, function: Callable[[], Any], generators: Iterable[torch.Generator]
    ) -> tuple[Any, Callable[[], None]]:
        self.captures += 1
        with _Record() as tape:
            result = function()
        return result, lambda: self._replay(tape)

    def _replay(self, tape: "_Record") -> None:
        self.replays += 1
        with torch.no_grad():
            tape.play()


class _NoteReads(TorchDispatchMode):
    def __init__(self, places: list[str]) -> None:
        super().__init__()
        self._places = places

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is READ:
            frame = next(
                each for each in reversed(traceback.extract_stack()[:-1]) if "site-packages" not in each.filename
            )
            self._places.append(f"{frame.filename}, line {frame.lineno}")
        return func(*args, **(kwargs or {}))


class _Record(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self._operations: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is READ:
            raise RuntimeError("operation not permitted when stream is capturing")
        result = func(*args, **(kwargs or {}))
        self._operations.append((func, args, kwargs or {}, result))
        return result

    def results(self) -> list[torch.Tensor]:
        """Of the last operation with a result in floating point."""
        found = [each for *_, result in self._operations for each, _ in pairs_of_tensors(result, result)]
        return [tensor for tensor in found if tensor.is_floating_point()]

    def play(self) -> None:
        for func, args, kwargs, result in self._operations:
            for recorded, computed in pairs_of_tensors(result, func(*args, **kwargs)):
                # Views and tensors that were changed in place are where they were.
                if recorded.data_ptr() != computed.data_ptr():
                    recorded.copy_(computed)


def pairs_of_tensors(recorded: Any, computed: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The tensors of two nested containers of one structure, each beside its counterpart."""
    if isinstance(recorded, torch.Tensor):
        yield recorded, computed
    elif isinstance(recorded, (tuple, list, dict)):
        items = (recorded.values(), computed.values()) if isinstance(recorded, dict) else (recorded, computed)
        for one, other in zip(*items, strict=True):
            yield from pairs_of_tensors(one, other)


class CapturesTape:
    """Put before a trainer class, it has the steps captured by `capturer`, or as a tape."""

    capturer: Capturer | None = None

    def _create_capturer(self) -> Capturer | None:
        return self.capturer or TapeCapturer()


class CapturedOnCpu(CapturesTape, Trainer):
    """A trainer whose steps are captured as a tape."""


class CapturableSGD(torch.optim.Optimizer):
    """Momentum in tensor operations alone: what a capturable optimizer of torch does on a CUDA device."""

    def __init__(self, parameters: Iterable[Any], lr: float = 0.1, momentum: float = 0.9) -> None:
        defaults = {"lr": torch.tensor(lr, dtype=torch.float64), "momentum": momentum, "capturable": True}
        super().__init__(parameters, defaults)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["velocity"] = torch.zeros_like(parameter)
                state["velocity"].mul_(group["momentum"]).add_(parameter.grad)
                parameter.sub_(state["velocity"] * group["lr"].to(parameter.dtype))
