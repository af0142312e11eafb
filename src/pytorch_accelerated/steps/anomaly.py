"""Looks for NaN in every backward pass, and tells in which module it came up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from pytorch_accelerated.data.updates import Update
from pytorch_accelerated.models.wrappers import bare_model
from pytorch_accelerated.training.error_notes import add_module
from pytorch_accelerated.training.step import Step, StepParts
from pytorch_accelerated.trees import tensors_in


class AnomalyStep(Step):
    """A step with torch's anomaly detection in forward and backward passes."""

    def __init__(self, parts: StepParts) -> None:
        super().__init__(parts)
        self._watch = _BackwardWatch(bare_model(parts.hooks.model))

    def update(self, update: Update) -> None:
        """One update. The note of an error in its backward pass names the module."""
        self._watch.forget()
        try:
            with torch.autograd.set_detect_anomaly(True):
                super().update(update)
        except Exception as error:
            add_module(error, self._watch.place)
            raise

    def release(self) -> None:
        """Remove the hooks, too."""
        super().release()
        self._watch.close()


class _BackwardWatch:
    """Knows in which module a backward pass is.

    A backward pass enters a module where it computes the gradient of its outputs, and has left it where it computes the
    gradient of what made its inputs. Hooks of these places note that; unlike backward hooks of modules they do not
    change the tensors, so that modules may still work in place.
    """

    def __init__(self, model: nn.Module) -> None:
        self._entered: dict[str, str] = {}  # names and classes, in the order in which the backward pass came to them
        self._made_inputs: dict[str, list[Any]] = {}
        self._hooks: list[Any] = []
        for name, module in model.named_modules():
            self._hooks.append(module.register_forward_pre_hook(self._before(name), with_kwargs=True))
            self._hooks.append(module.register_forward_hook(self._after(name, type(module).__name__)))

    @property
    def place(self) -> str:
        """The innermost module that the backward pass has entered and not left."""
        if not self._entered:
            return "the loss function, or to what follows the model"
        depth, _, name = max((name.count(".") + bool(name), at, name) for at, name in enumerate(self._entered))
        return f"the module {name!r} ({self._entered[name]})" if depth else f"the model ({self._entered[name]})"

    def forget(self) -> None:
        """Begin anew."""
        self._entered.clear()
        self._made_inputs.clear()

    def close(self) -> None:
        """Remove all hooks of modules."""
        for hook in self._hooks:
            hook.remove()

    def _before(self, name: str) -> Callable[..., None]:
        def note(module: nn.Module, arguments: Any, keywords: Any) -> None:
            made = _nodes_of([list(arguments), dict(keywords)])
            self._made_inputs[name] = made
            for node in made:
                node.register_prehook(lambda gradients: self._leave(name))

        return note

    def _after(self, name: str, kind: str) -> Callable[..., None]:
        def note(module: nn.Module, arguments: Any, output: Any) -> None:
            made = self._made_inputs.pop(name, [])
            for node in _nodes_of(output):
                if not any(node is each for each in made):  # a module that returns what it gets has no backward pass
                    node.register_prehook(lambda gradients: self._enter(name, kind))

        return note

    def _enter(self, name: str, kind: str) -> None:
        self._entered.pop(name, None)
        self._entered[name] = kind

    def _leave(self, name: str) -> None:
        self._entered.pop(name, None)


def _nodes_of(value: Any) -> list[Any]:
    return [tensor.grad_fn for tensor in tensors_in(value) if tensor.grad_fn is not None]
