"""Says which parameters, or which module's outputs, are NaN or infinite. Waits for the device."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from pytorch_accelerated.models.sharding import has_shards
from pytorch_accelerated.trees import leaves

_MOST_NAMES = 3


def is_all_finite(value: Any) -> bool:
    """Whether every floating-point number in nested containers is finite."""
    tensors = [leaf for leaf in leaves(value) if isinstance(leaf, torch.Tensor) and not leaf.is_sparse]
    return all(bool(torch.isfinite(tensor).all()) for tensor in tensors if tensor.is_floating_point())


def described_parameters(model: nn.Module) -> str:
    """A sentence about the parameters that are not finite."""
    if has_shards(model):
        return "The parameters are sharded, and were not looked at."
    parameters = dict(model.named_parameters())
    bad = [name for name, parameter in parameters.items() if not is_all_finite(parameter.detach())]
    if not bad:
        return "The parameters are finite so far."
    return f"By now {len(bad)} of {len(parameters)} parameters are not finite: {listed(bad)}."


def listed(names: list[str]) -> str:
    """The first names, and how many there are besides."""
    shown = ", ".join(map(repr, names[:_MOST_NAMES]))
    return shown + (f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else "")


class FirstNonFinite:
    """Which modules make values that are not finite out of finite ones, in the order in which they do.

    Attributes:
        names: those modules; of a module and one inside it, only the one inside.
    """

    def __init__(self) -> None:
        self.names: list[str] = []

    @contextlib.contextmanager
    def watching(self, model: nn.Module) -> Iterator[None]:
        """Context in which the forward passes of the modules of `model` are watched."""
        with contextlib.ExitStack() as hooks:
            for name, module in model.named_modules():
                hook = module.register_forward_hook(self._hook_of(name), with_kwargs=True)
                hooks.callback(hook.remove)
            yield

    def _hook_of(self, name: str) -> Any:
        def look(module: nn.Module, arguments: Any, keywords: Any, output: Any) -> None:
            inside = f"{name}." if name else ""
            is_known = name in self.names or any(each.startswith(inside) for each in self.names)
            if not is_known and not is_all_finite(output) and is_all_finite([list(arguments), dict(keywords)]):
                self.names.append(name or type(module).__name__)

        return look
