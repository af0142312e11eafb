"""Checks the return value of a hook before it is used."""

from __future__ import annotations

import numbers
from collections.abc import Mapping
from typing import Any

import torch

from pytorch_accelerated.errors import HookOutputError


def loss_and_size(output: Any, *, hook: str) -> tuple[Any, Any]:
    """The loss that a hook returned, and the number of items that it is the mean of.

    Raises:
        HookOutputError: if one of them is missing or unusable.
    """
    is_mapping = isinstance(output, Mapping)
    if not is_mapping or "loss" not in output or "batch_size" not in output:
        entries = f" with {', '.join(map(repr, output)) or 'nothing in it'}" if is_mapping else ""
        raise HookOutputError(
            f"`{hook}` returned a {type(output).__name__}{entries}, but the loop needs a dict with 'loss' (a tensor "
            "with one element), 'model_outputs' and 'batch_size'. Return one."
        )
    loss, size = output["loss"], output["batch_size"]
    count = output.get("num_items_in_batch")
    if count is not None:
        size = count
    if not _is_one_number(loss):
        raise HookOutputError(
            f"`{hook}` returned {_described(loss)} as 'loss', but the loop needs the mean over the batch, one number. "
            "Return a tensor with one element, for example with `.mean()` in the hook or the loss function."
        )
    # Reading a tensor would wait for the device.
    if not _is_one_number(size) or (type(size) is int and size < (1 if count is None else 0)):
        name = "batch_size" if count is None else "num_items_in_batch"
        shown = size if type(size) is int else _described(size)
        raise HookOutputError(
            f"`{hook}` returned {shown} as {name!r}, but the loop needs the number of items that the loss is the mean "
            "of. Return a number above 0; only `num_items_in_batch` may be 0."
        )
    return loss, size


def adding_nothing(loss: Any) -> Any:
    """A loss of 0 whose backward pass reaches everything that `loss` was computed from and adds exactly nothing.

    Other ranks wait for that backward pass. A mean over no items is 0 / 0, and its gradient is NaN even when multiplied
    by 0.
    """
    found, nodes = set(), [getattr(loss, "grad_fn", None)]
    while nodes:
        node = nodes.pop()
        if node is not None and node not in found:
            found.add(node)
            node.register_hook(_zeros)
            nodes.extend(before for before, _ in node.next_functions)
    return (loss * 0.0).nan_to_num(0.0)


def _zeros(gradients: tuple[torch.Tensor | None, ...], _: Any) -> tuple[torch.Tensor | None, ...]:
    return tuple(None if gradient is None else torch.zeros_like(gradient) for gradient in gradients)


def _is_one_number(value: Any) -> bool:
    """Whether `value` is a number, or a tensor with one element. Does not wait for the device."""
    if type(value) is int:
        return True
    if isinstance(value, torch.Tensor):
        return value.ndim == 0 or value.numel() == 1
    return isinstance(value, numbers.Real)


def _described(value: Any) -> str:
    shape = f" of shape {list(value.shape)}" if isinstance(value, torch.Tensor) else ""
    return f"{'None' if value is None else f'a {type(value).__name__}'}{shape}"
