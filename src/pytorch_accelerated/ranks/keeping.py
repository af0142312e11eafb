"""Keeps what a run consists of as it is now, to give it back: the one way to undo anything.

An update that must not count, a rehearsal, a load that fails half-way, an evaluation of other weights: each says what
it keeps, and calls `Kept.restore`, or leaves a block of `kept`.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from pytorch_accelerated.facts.seeding import generator_states, restore_generator_states
from pytorch_accelerated.ranks.optimizers import Optimizers


class Kept:
    """What was kept. `restore` gives it back, last one first, as often as it is called."""

    def __init__(self) -> None:
        self._restores: list[Callable[[], object]] = []

    def restore(self) -> None:
        """Give everything back, also if giving back something else fails."""
        with contextlib.ExitStack() as stack:
            for restore in self._restores:
                stack.callback(restore)

    def call(self, restore: Callable[..., object], *args: Any) -> None:
        """Have `restore` called with `args`."""
        self._restores.append(functools.partial(restore, *args))

    def attributes(self, target: Any, **values: Any) -> None:
        """Keep attributes of `target`, and set them to other `values`. What somebody else assigns meanwhile stays."""

        def restore(name: str, value: Any, before: Any) -> None:
            if getattr(target, name) is value:
                setattr(target, name, before)

        for name, value in values.items():
            self.call(restore, name, value, getattr(target, name))
            setattr(target, name, value)

    def generators(self) -> None:
        """Keep the states of the generators of torch, numpy and random."""
        self.call(restore_generator_states, generator_states())

    def tensors(self, tensors: Iterable[torch.Tensor], device: str | None = None) -> None:
        """Keep values, in copies on `device`; default: each tensor's own."""
        copies = [(each, each.detach().to(each.device if device is None else device, copy=True)) for each in tensors]

        @torch.no_grad()
        def restore() -> None:
            for tensor, before in copies:
                tensor.copy_(before)

        self.call(restore)

    def gradients(self, parameters: Iterable[torch.Tensor]) -> None:
        """Keep gradients. None is kept as None."""
        before = [(parameter, parameter.grad) for parameter in parameters]
        for parameter, gradient in before:
            self.call(setattr, parameter, "grad", gradient)
        self.tensors([gradient for _, gradient in before if gradient is not None])

    def modes(self, module: nn.Module) -> None:
        """Keep whether each part of `module` is in training or evaluation mode."""
        for part in module.modules():
            self.call(setattr, part, "training", part.training)

    def module(self, module: nn.Module) -> None:
        """Keep parameters, buffers, gradients and modes, also if the module is moved to another device."""
        # In reverse order, so that a gradient comes back to a parameter that is on its old device again.
        self.modes(module)
        self.gradients(module.parameters())
        for part in module.modules():
            for name, buffer in part.named_buffers(recurse=False):
                self.call(setattr, part, name, buffer)
        for parameter in module.parameters():
            self.call(setattr, parameter, "data", parameter.data)
        self.tensors([*(parameter.data for parameter in module.parameters()), *module.buffers()])

    def object(self, target: Any) -> None:
        """Keep the attributes of `target`, and the contents of its lists, dicts and sets."""
        if not hasattr(target, "__dict__"):
            return
        before = dict(vars(target))
        for value in before.values():
            if type(value) in (list, dict, set):
                self.contents(value)
        self.call(vars(target).update, before)
        self.call(vars(target).clear)

    def contents(self, container: Any) -> None:
        """Keep what is in a list, deque, dict or set."""
        items = container.copy()

        def restore() -> None:
            if isinstance(container, set) and container == items:
                return  # filled again, it may have another order
            container.clear()
            container.update(items) if isinstance(container, (set, dict)) else container.extend(items)

        self.call(restore)

    def optimizer(self, optimizer: Any, *, steps: bool = True) -> None:
        """Keep the state and the groups of an optimizer.

        Args:
            optimizer: of torch, or one around it.
            steps: whether it will step, so that its state must be copied. It is enough to keep the old state where
                another one is loaded, because optimizers make a new one then.
        """
        inner = _owner(getattr(optimizer, "optimizer", optimizer))
        if isinstance(inner, Optimizers):
            for one in inner:
                self.optimizer(one, steps=steps)
            return
        if not (hasattr(inner, "param_groups") and hasattr(inner, "state")):
            self.call(inner.load_state_dict, copy.deepcopy(inner.state_dict()))
            return
        state, groups = inner.state, inner.param_groups
        keep: Callable[[Any], Any] = copy.deepcopy if steps else lambda value: value
        entries = {parameter: keep(entry) for parameter, entry in state.items()}
        settings = [
            {name: list(value) if name == "params" else keep(value) for name, value in group.items()}
            for group in groups
        ]

        def restore() -> None:
            state.clear()
            state.update(entries)
            for group, before in zip(groups, settings, strict=True):
                group.clear()
                group.update(before)
            inner.state, inner.param_groups = state, groups

        self.call(restore)


def _owner(optimizer: Any) -> Any:
    """The optimizer that has the groups: one around another, as of schedulefree, may only show them."""
    within = (each for each in vars(optimizer).values() if hasattr(each, "param_groups"))
    owner = next((each for each in within if each.param_groups is optimizer.param_groups), None)
    return optimizer if owner is None else _owner(owner)


@contextlib.contextmanager
def kept(*, only_if_it_fails: bool = False) -> Iterator[Kept]:
    """What the block keeps is restored at its end; with `only_if_it_fails` only if an exception leaves it."""
    keeping = Kept()
    try:
        yield keeping
    except BaseException:
        keeping.restore()
        raise
    if not only_if_it_fails:
        keeping.restore()
