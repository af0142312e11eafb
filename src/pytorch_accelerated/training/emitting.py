"""Emits events and calls hooks. A request to stop is deferred until all ranks can stop together."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from pytorch_accelerated.errors import HookOutputError, StopTrainingError
from pytorch_accelerated.facts.error_notes import note_failure

if TYPE_CHECKING:
    from pytorch_accelerated.facts.context import Context

_BEFORE_COUNTING = ("calculate_train_batch_loss", "backward_step", "training_step")  # hooks of a batch


class Emitter:
    """Calls the user's code: callbacks and hooks.

    Args:
        context: has the trainer and its callbacks.

    Attributes:
        wish: the first deferred request to stop; None if there is none.
    """

    def __init__(self, context: Context) -> None:
        self.wish: StopTrainingError | None = None
        self._context = context

    def emit(self, event: str, **kwargs: Any) -> None:
        """Call the callbacks that handle `event`. A request to stop is deferred."""
        callbacks = self._context.callbacks
        try:
            if callbacks.acts_at[event]:
                callbacks.call_event(event, self._context.trainer, **kwargs)
        except StopTrainingError as wish:
            self.wish = self.wish or wish

    def emit_at_once(self, event: str, **kwargs: Any) -> None:
        """Call the callbacks that handle `event`. A request to stop is raised: all ranks must emit this event."""
        self._context.callbacks.call_event(event, self._context.trainer, **kwargs)

    def defer(self, hook: Callable[..., Any], *args: Any) -> None:
        """Call `hook`. A request to stop is deferred."""
        try:
            hook(*args)
        except StopTrainingError as wish:
            self.wish = self.wish or wish

    def explain(self, error: Exception, hook: Callable[..., Any], batch: Any, start: int | None = None) -> None:
        """Add a note to the error of a hook: the hook, the batch and the position in the run.

        Args:
            error: what the hook raised.
            hook: a hook of a batch or an update.
            batch: the current one.
            start: the position of its first sample in an evaluation or prediction; None in training.

        Raises:
            HookOutputError: for a request to stop on one of several ranks, while the others wait for what the hook
                returns: gradients, or what their callbacks gather.
        """
        context, name = self._context, getattr(hook, "__name__", str(hook))
        state, ranks = context.state, context.ranks
        if isinstance(error, StopTrainingError):
            if ranks.count == 1:
                return
            raise HookOutputError(
                f"`{name}` raised StopTrainingError on rank {ranks.index} of {ranks.count}, before it returned what "
                "the other ranks wait for. Raise it in the event after it, or later."
            ) from error
        number = state.batches_in_epoch - (name not in _BEFORE_COUNTING)
        position = f"update {state.updates + 1} of the run, batch {number} of the epoch on this rank"
        if start is not None:
            position = f"after {state.updates} updates of the run, the batch that begins with sample {start}"
        note_failure(
            error,
            hook=name,
            batch=batch,
            position=f"epoch {context.history.current_epoch}, {position} (counted from 0)",
            rank=ranks.index,
            ranks=ranks.count,
        )
