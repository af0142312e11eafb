"""An update as a transaction: everything it changes before its gradients are applied can be undone."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from pytorch_accelerated.data.updates import Update
from pytorch_accelerated.seeding import generator_states, restore_generator_states
from pytorch_accelerated.training.step import Step, StepParts


class Transaction:
    """Records generators and buffers when an update begins, and restores them if the update must not count.

    Gradients are not copied: they are None between updates, unless the user's own `optimizer_zero_grad` keeps tensors.

    Args:
        holder: the object whose attributes are the current modules and generators: the trainer.

    Attributes:
        parameters: those of the modules and of the optimizer, at the beginning of the update.
    """

    def __init__(self, holder: Any) -> None:
        roots = [value for value in vars(holder).values() if isinstance(value, nn.Module)]
        self._modules = list({id(module): module for root in roots for module in root.modules()}.values())
        found = [value for each in (holder, *self._modules) for value in vars(each).values()]
        self._own_generators = [value for value in found if isinstance(value, torch.Generator)]
        self.parameters: list[torch.Tensor] = []
        self._begun: tuple[Any, ...] = ()

    def begin(self, parameters: Iterable[torch.Tensor]) -> None:
        """Record the current state.

        Args:
            parameters: the parameters of the optimizer.
        """
        of_modules = (parameter for module in self._modules for parameter in module.parameters(recurse=False))
        self.parameters = list({id(each): each for each in (*of_modules, *parameters)}.values())
        kept = [(each.grad, each.grad.clone()) for each in self.parameters if each.grad is not None]
        buffers = [
            (buffer, buffer.detach().clone())
            for module in self._modules
            for buffer in module.buffers(recurse=False)
            # Tensors whose elements share memory cannot be written to.
            if all(stride or size < 2 for stride, size in zip(buffer.stride(), buffer.shape, strict=True))
        ]
        gradients = [each.grad for each in self.parameters]
        own = [(each, each.get_state()) for each in self._own_generators]
        self._begun = (kept, buffers, gradients, own, generator_states())

    @torch.no_grad()
    def give_back(self) -> None:
        """Restore everything to the beginning of the update, which may then begin again."""
        kept, buffers, gradients, own, states = self._begun
        for tensor, copied in (*kept, *buffers):
            tensor.copy_(copied)
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient
        for generator, state in own:
            generator.set_state(state)
        restore_generator_states(states)

    def forget(self) -> None:
        """Drop the note: there is nothing to give back any more."""
        self._begun = ()


class TransactionalStep(Step):
    """A step whose updates can be undone."""

    def __init__(self, parts: StepParts) -> None:
        super().__init__(parts)
        self.transaction = Transaction(parts.hooks)

    def update(self, update: Update) -> None:
        """One update, from a recorded beginning."""
        self.transaction.begin(self.parameters())
        super().update(update)

    def release(self) -> None:
        """Drop the note of the last update, too."""
        super().release()
        self.transaction.forget()
