"""Activation checkpointing: less memory for what a forward pass keeps, at the price of computing it again."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from pytorch_accelerated.errors import ConfigurationError
from pytorch_accelerated.ranks import kept, listed


def checkpoint_activations(model: nn.Module, *kinds: str | type[nn.Module]) -> int:
    """Keep only the inputs of these modules for the backward pass, which computes the rest again.

    ::

        checkpoint_activations(model, "TransformerEncoderLayer")

    Gradients are the same to the bit: dropout draws the same numbers again, and buffers, such as the statistics of
    BatchNorm, change once. Evaluation is as before. Names, parameters and classes stay; call it before or after an
    optimizer is made, but before the model is compiled. For models of transformers, call their own
    ``model.gradient_checkpointing_enable()``.

    Args:
        model: the model.
        kinds: classes of modules in it, or their names; usually the block that is repeated.

    Returns:
        The number of such modules.

    Raises:
        ConfigurationError: if there is none.
    """
    found = [module for module in model.modules() if not {type(module), type(module).__name__}.isdisjoint(kinds)]
    if not found:
        names = listed(sorted({type(module).__name__ for module in model.modules()}))
        raise ConfigurationError(f"The model has no module of the kinds {kinds}. It has {names}.")
    for module in found:
        if not isinstance(module.forward, _Checkpointed):
            module.forward = _Checkpointed(module, module.forward)
    return len(found)


class _Checkpointed:
    """A forward pass that is computed again in the backward pass."""

    def __init__(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        self._module = module
        self._forward = forward
        functools.update_wrapper(self, forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self._forward(*args, **kwargs)
        if torch.compiler.is_compiling():  # compiled code changes buffers in the forward pass only
            return checkpoint(self._forward, *args, use_reentrant=False, **kwargs)
        return checkpoint(self._forward, *args, use_reentrant=False, context_fn=self._contexts, **kwargs)

    def _contexts(self) -> tuple[contextlib.AbstractContextManager[Any], contextlib.AbstractContextManager[Any]]:
        return contextlib.nullcontext(), self._again()

    @contextlib.contextmanager
    def _again(self) -> Iterator[None]:
        with kept() as before:
            before.tensors(self._module.buffers())
            yield
