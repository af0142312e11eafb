"""The numbers of a model: the norm of its gradients, and which parameters or outputs are NaN or infinite."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from pytorch_accelerated.facts.trees import leaves
from pytorch_accelerated.ranks.compat.torch import norms_of, scale_all
from pytorch_accelerated.ranks.sharding import has_shards, whole

_MOST_NAMES = 3


def clip_norm(parameters: Sequence[torch.Tensor], most: float) -> torch.Tensor:
    """Scale the gradients of `parameters` so that their common norm is at most `most`. Returns the norm before.

    Does not wait for the device. Must be called by all ranks, because sharded gradients have one norm.

    Equals torch's ``clip_grad_norm_`` to the bit. If all gradients are plain tensors of one device and type, it takes a
    third of the time for small models: torch sorts the gradients by both, twice.
    """
    norm: torch.Tensor
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    kinds = {(type(each), each.device, each.dtype, each.requires_grad) for each in gradients}
    if len(kinds) != 1 or type(gradients[0]) is not torch.Tensor or gradients[0].requires_grad:
        norm = torch.nn.utils.clip_grad_norm_(parameters, most)
        return whole(norm)  # type: ignore[no-any-return]
    norm = torch.linalg.vector_norm(torch.stack(norms_of(gradients)))
    scale_all(gradients, norm.add(1e-6).reciprocal_().mul_(most).clamp_(max=1.0))
    return norm


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
    """The first names, and the number of further ones."""
    shown = ", ".join(map(repr, names[:_MOST_NAMES]))
    return shown + (f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else "")


@contextlib.contextmanager
def non_finite_modules(model: nn.Module) -> Iterator[list[str]]:
    """In the block, which modules of `model` make values that are not finite out of finite ones, in that order.

    Of a module and one inside it, the list gets only the name of the one inside.
    """
    names: list[str] = []

    def look(name: str, module: nn.Module, arguments: Any, keywords: Any, output: Any) -> None:
        inside = f"{name}." if name else ""
        is_known = name in names or any(each.startswith(inside) for each in names)
        if not is_known and not is_all_finite(output) and is_all_finite([list(arguments), dict(keywords)]):
            names.append(name or type(module).__name__)

    with contextlib.ExitStack() as hooks:
        for name, module in model.named_modules():
            hook = module.register_forward_hook(functools.partial(look, name), with_kwargs=True)
            hooks.callback(hook.remove)
        yield names
