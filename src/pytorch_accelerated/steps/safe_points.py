"""An update as a transaction: everything it changes before its gradients are applied can be undone.

A run whose last safe point is kept in this way can be saved as it was there, if an error ends it.
`docs/design/failing-updates.md` has the reasons.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from pytorch_accelerated.checkpointing.training_state import LiveRun
from pytorch_accelerated.compat.torch import tensor_stores, version_of
from pytorch_accelerated.data.updates import Update
from pytorch_accelerated.facts.order import EVENTS_OF_UPDATE
from pytorch_accelerated.models.held import held_parts, optimizers_of
from pytorch_accelerated.seeding import generator_states, restore_generator_states
from pytorch_accelerated.steps.step import Call, Step, StepParts

if TYPE_CHECKING:
    from pytorch_accelerated.training.hooks import TrainerHooks

_EVENTS_BEFORE = [event for event in EVENTS_OF_UPDATE if event != "on_optimizer_step_end"]


class Transaction:
    """Records generators and buffers when an update begins, and restores them if the update must not count.

    Gradients are not copied: they are None between updates, unless the user's own `optimizer_zero_grad` keeps tensors.

    Args:
        hooks: the trainer of the loop, whose model is the current one.
        holder: the trainer that users see, which may hold further modules and generators.

    Attributes:
        parameters: those of the modules and of the optimizer, at the beginning of the update.
    """

    def __init__(self, hooks: Any, holder: Any) -> None:
        roots = [part for part in (hooks.model, *held_parts(holder).values()) if isinstance(part, nn.Module)]
        modules = list({id(module): module for root in roots for module in root.modules()}.values())
        self._stores = [tensor_stores(module) for module in modules]
        found = [value for each in (holder, *modules) for value in vars(each).values()]
        self._own_generators = [value for value in found if isinstance(value, torch.Generator)]
        self.parameters: list[torch.Tensor] = []
        self._begun: tuple[Any, ...] = ()

    def begin(self, parameters: Iterable[torch.Tensor]) -> None:
        """Record the current state.

        Args:
            parameters: the parameters of the optimizer.
        """
        of_modules = (each for store, _ in self._stores for each in store.values() if each is not None)
        self.parameters = list({id(each): each for each in (*of_modules, *parameters)}.values())
        kept = [(each.grad, each.grad.clone()) for each in self.parameters if each.grad is not None]
        buffers = [
            (buffer, buffer.detach().clone())
            for _, store in self._stores
            for buffer in store.values()
            # Tensors whose elements share memory cannot be written to.
            if buffer is not None
            and all(stride or size < 2 for stride, size in zip(buffer.stride(), buffer.shape, strict=True))
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
        self.transaction = Transaction(parts.hooks, parts.holder)

    def update(self, update: Update) -> None:
        """One update, from a recorded beginning."""
        self.transaction.begin(self.parameters())
        super().update(update)

    def release(self) -> None:
        """Drop the note of the last update, too."""
        super().release()
        self.transaction.forget()


class SafePoint:
    """The last moment of a training run at which everything was consistent.

    Parameters, optimizer and scheduler are not copied: a run can be saved as it was there only if they are still the
    same. For one process.

    Args:
        hooks: the trainer, once its model is prepared.
        holder: the trainer that users see.
        contents: returns the parts of the run.
    """

    def __init__(self, hooks: TrainerHooks, holder: Any, contents: Callable[[], LiveRun]) -> None:
        self._hooks = hooks
        self._holder = holder
        self._contents = contents
        self._transaction = Transaction(hooks, holder)
        self._kept: LiveRun | None = None
        self._parameters: list[tuple[Any, int | None]] = []
        self._updates_at_start: int | None = None
        self._listeners = self._find_listeners()

    def note(self, *, everything: bool) -> None:
        """Make this moment the last safe point.

        Args:
            everything: also keep the run history and the states of all callbacks, because something else than an update
                follows. An update changes only those of callbacks that hear of its batches.
        """
        self.leave()  # an interrupt may come at any moment
        run = self._contents()
        if self._updates_at_start is None:
            self._updates_at_start = run.run_state.updates
        optimizers = optimizers_of(self._holder, run.held).values()
        parameters = [each for one in optimizers for group in one.param_groups for each in group["params"]]
        self._transaction.begin(parameters)
        self._parameters = [(each, version_of(each)) for each in self._transaction.parameters]
        if everything:
            self._listeners = self._find_listeners()
        if run.kept is None:  # else the epoch is cut, and states are of the moment before its end
            run = run.frozen(run.callbacks if everything else self._listeners, everything=everything)
        self._kept = run

    def leave(self) -> None:
        """Forget the last safe point: something begins that cannot be undone."""
        self._kept = None

    def go_back(self) -> LiveRun | None:
        """Restore buffers and generators. The parts of the run as they were at the last safe point; None if unknown."""
        kept = self._kept
        if kept is None or any(version_of(each) != version for each, version in self._parameters):
            return None
        self._transaction.give_back()
        return kept

    @property
    def has_progress(self) -> bool:
        """Whether an update has been completed since the run began or was resumed."""
        return self._updates_at_start is not None and self._hooks.run_state.updates > self._updates_at_start

    def _find_listeners(self) -> list[Any]:
        """The callbacks whose state an update may have changed before it is applied."""
        methods = [each for event in _EVENTS_BEFORE for each in self._hooks.callback_handler.acting_methods(event)]
        return list({id(owner): owner for method in methods if (owner := getattr(method, "__self__", None))}.values())


class NotedStep(Step):
    """A step that leaves the safe point when it begins to change the parameters."""

    def finish(self, calls: Sequence[Call], *, is_skipped: bool) -> None:
        """Apply the update; see `Step.finish`."""
        assert self.parts.before_applying is not None
        self.parts.before_applying()
        super().finish(calls, is_skipped=is_skipped)
