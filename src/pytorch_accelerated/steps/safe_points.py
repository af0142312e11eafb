"""An update that can be undone: everything it changes before its gradients are applied is kept.

A run whose last safe point is kept in this way can be saved as it was there, if an error ends it.
`docs/design/failing-updates.md` has the reasons.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from pytorch_accelerated.checkpointing.training_state import frozen
from pytorch_accelerated.compat.torch import tensor_stores, version_of
from pytorch_accelerated.data.updates import Update
from pytorch_accelerated.facts.context import Context
from pytorch_accelerated.facts.order import EVENTS_OF_UPDATE
from pytorch_accelerated.models.held import held_parts, optimizers_of
from pytorch_accelerated.models.kept import Kept
from pytorch_accelerated.steps.step import Call, Step

_EVENTS_BEFORE = [event for event in EVENTS_OF_UPDATE if event != "on_optimizer_step_end"]


class Beginnings:
    """Keeps what updates change before they are applied: gradients, buffers and generators, but not the parameters.

    Args:
        context: of the run, whose model is prepared.

    Attributes:
        parameters: those of the modules and of the optimizer, when the last update began.
    """

    def __init__(self, context: Context) -> None:
        holder = context.holder
        roots = [part for part in (context.model, *held_parts(holder).values()) if isinstance(part, nn.Module)]
        modules = list({id(module): module for root in roots for module in root.modules()}.values())
        self._stores = [tensor_stores(module) for module in modules]
        found = [value for each in (holder, *modules) for value in vars(each).values()]
        self._own_generators = [value for value in found if isinstance(value, torch.Generator)]
        self.parameters: list[torch.Tensor] = []

    def kept(self, parameters: Iterable[torch.Tensor]) -> Kept:
        """What an update begins with.

        Args:
            parameters: of the optimizer.
        """
        of_modules = (each for store, _ in self._stores for each in store.values() if each is not None)
        self.parameters = list({id(each): each for each in (*of_modules, *parameters)}.values())
        kept = Kept()
        kept.generators()
        for generator in self._own_generators:
            kept.call(generator.set_state, generator.get_state())
        kept.gradients(self.parameters)
        kept.tensors(
            buffer
            for _, store in self._stores
            for buffer in store.values()
            # Tensors whose elements share memory cannot be written to.
            if buffer is not None
            and all(stride or size < 2 for stride, size in zip(buffer.stride(), buffer.shape, strict=True))
        )
        return kept


class UndoneStep(Step):
    """A step whose updates can be undone.

    Attributes:
        before_update: what the current update began with.
    """

    def __init__(self, context: Context, *args: Any, **kwargs: Any) -> None:
        super().__init__(context, *args, **kwargs)
        self._beginnings = Beginnings(context)
        self.before_update = Kept()

    def update(self, update: Update) -> None:
        """One update."""
        self.before_update = self._beginnings.kept(self.parameters())
        super().update(update)

    def release(self) -> None:
        """Drop what the last update began with, too."""
        super().release()
        self.before_update = Kept()


class SafePoint:
    """The last moment of a training run at which everything was consistent.

    Parameters, optimizer and scheduler are not copied: a run can be saved as it was there only if they are still the
    same. For one process.

    Args:
        context: of the run, whose model is prepared.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._beginnings = Beginnings(context)
        self._before = Kept()
        self._kept: Context | None = None
        self._versions: list[tuple[Any, int | None]] = []
        self._updates_at_start: int | None = None
        self._optimizers: list[Any] = []
        self._listeners: list[Any] = []

    def look(self) -> None:
        """Find the optimizers, and the callbacks whose state an update may change, as they are now.

        Takes milliseconds for a large model: not before each update.
        """
        holder, callbacks = self._context.holder, self._context.callbacks
        self._optimizers = list(optimizers_of(holder, held_parts(holder)).values())
        methods = [each for event in _EVENTS_BEFORE for each in callbacks.acting_methods(event)]
        owners = [owner for method in methods if (owner := getattr(method, "__self__", None))]
        self._listeners = list({id(owner): owner for owner in owners}.values())

    def note(self, run: Context, *, everything: bool) -> None:
        """Make this moment the last safe point.

        Args:
            run: the context; where its epoch is cut, as it was before the end of the epoch.
            everything: also keep the run history and the states of all callbacks, because something else than an update
                follows. An update changes only those of callbacks that hear of its batches.
        """
        self.leave()  # an interrupt may come at any moment
        if self._updates_at_start is None:
            self._updates_at_start = run.state.updates
        if everything:
            self.look()
        self._before = self._beginnings.kept(
            [each for one in self._optimizers for group in one.param_groups for each in group["params"]]
        )
        self._versions = [(each, version_of(each)) for each in self._beginnings.parameters]
        if run.kept is None:
            run = frozen(run, run.callbacks if everything else self._listeners, everything=everything)
        self._kept = run

    def leave(self) -> None:
        """Forget the last safe point: something begins that cannot be undone."""
        self._kept = None

    def go_back(self) -> Context | None:
        """Restore buffers and generators. The run as it was at the last safe point; None if unknown."""
        if self._kept is None or any(version_of(each) != version for each, version in self._versions):
            return None
        self._before.restore()
        return self._kept

    @property
    def has_progress(self) -> bool:
        """Whether an update has been completed since the run began or was resumed."""
        return self._updates_at_start is not None and self._context.state.updates > self._updates_at_start


class NotedStep(Step):
    """A step that leaves the safe point when it begins to change the parameters."""

    def finish(self, calls: Sequence[Call], *, is_skipped: bool) -> None:
        """Apply the update; see `Step.finish`."""
        assert self.context.training.safe_point is not None
        self.context.training.safe_point.leave()
        super().finish(calls, is_skipped=is_skipped)
