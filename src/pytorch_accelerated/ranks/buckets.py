"""The order of gradients in DDP's buckets, with which a resumed run goes on.

DDP averages gradients by the bucket, and the ranks of a part of a bucket are added up in an order that depends on where
the part is. Three numbers and more have other bits in another order. DDP fills its buckets in the order of the
parameters at first, and from its second forward pass on in the order in which the first gradients came, so a run in a
new process would begin with other buckets than it was stopped with.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class GradientOrder:
    """Notes the order in which the first gradients of a DDP model come, or brings them in a given one.

    Where DDP keeps its first buckets, or has a static graph to watch, there is nothing to do.

    Args:
        model: the wrapped model, not called yet.

    Attributes:
        names: of the parameters in that order; empty before the first gradients that are exchanged.
    """

    def __init__(self, model: DistributedDataParallel) -> None:
        self._model = model
        self._parameters = {name: each for name, each in model.module.named_parameters() if each.requires_grad}
        self.names: dict[str, None] = {}
        self._hooks = [model.register_forward_pre_hook(lambda *_: self._end())]
        for name, parameter in self._parameters.items():
            self._hooks.append(parameter.register_post_accumulate_grad_hook(functools.partial(self._note, name)))

    def repeat(self, names: Iterable[str]) -> None:
        """Make the buckets of a run whose first gradients came in this order. Must be called by all ranks.

        Gradients of zero pass through the model in this order once. Not for a model that has had gradients already, or
        that trains other parameters now.
        """
        order = list(names)
        if self.names or set(order) != set(self._parameters):
            return
        parameters = [self._parameters[name] for name in order]
        model = self._model
        before = model.module, model.broadcast_buffers
        model.module, model.broadcast_buffers = _Chain(parameters), False  # it has no buffers to broadcast
        try:
            model(torch.zeros(())).backward()
        finally:
            model.module, model.broadcast_buffers = before
        for parameter in parameters:
            parameter.grad = None

    def release(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _note(self, name: str, _: torch.Tensor) -> None:
        if self._model.require_backward_grad_sync:
            self.names.setdefault(name)  # one that is used in two backward passes counts once

    def _end(self) -> None:
        if self.names:
            self.release()


class _Chain(nn.Module):
    """A model that uses parameters in the reverse of an order, so that their gradients come in this order."""

    def __init__(self, parameters: list[torch.Tensor]) -> None:
        super().__init__()
        self._used = parameters  # a list, whose parameters are not the module's own

    def forward(self, total: torch.Tensor) -> torch.Tensor:
        for parameter in reversed(self._used):
            total = total.to(parameter.device) + (parameter * 0).sum()
        return total
