"""Emits events and calls hooks. A request to stop is deferred until all ranks can stop together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pytorch_accelerated.errors import HookOutputError, StopTrainingError
from pytorch_accelerated.facts.error_notes import note_failure
from pytorch_accelerated.processes.ranks import Ranks
from pytorch_accelerated.training.hooks import TrainerHooks


class Emitter:
    """Calls the user's code: callbacks and hooks.

    Args:
        hooks: the trainer.
        ranks: the processes.

    Attributes:
        wish: the first deferred request to stop; None if there is none.
        batch: the current training batch, for notes on errors.
    """

    def __init__(self, hooks: TrainerHooks, ranks: Ranks) -> None:
        self.wish: StopTrainingError | None = None
        self.batch: Any = None
        self._hooks = hooks
        self._ranks = ranks

    def emit(self, event: str, **kwargs: Any) -> None:
        """Call the callbacks that handle `event`. A request to stop is deferred."""
        handler = self._hooks.callback_handler
        try:
            if handler.acts_at[event]:
                handler.call_event(event, self._hooks, **kwargs)
        except StopTrainingError as wish:
            self.wish = self.wish or wish

    def emit_at_once(self, event: str, **kwargs: Any) -> None:
        """Call the callbacks that handle `event`. A request to stop is raised: all ranks must emit this event."""
        self._hooks.callback_handler.call_event(event, self._hooks, **kwargs)

    def defer(self, hook: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """Call `hook`. A request to stop is deferred; any other error gets a note that says where it was raised."""
        try:
            hook(*args, **kwargs)
        except StopTrainingError as wish:
            self.wish = self.wish or wish
        except Exception as error:
            self.note_failure(error, hook)
            raise

    def output_of(self, hook: Callable[[Any], Any], batch: Any, samples: int | None, start: int | None = None) -> Any:
        """The output of `hook` for a batch.

        Args:
            hook: a hook of a batch, for whose output other ranks wait.
            batch: the batch, on the trainer's device.
            samples: in the batch; None if unknown. The default hooks use this number.
            start: the position of the batch's first sample in an evaluation or prediction; None in training.

        Raises:
            HookOutputError: if the hook requests a stop on one of several ranks.
        """
        self._hooks._batch_samples = samples
        try:
            return hook(batch)
        except StopTrainingError as wish:
            self.refuse_to_stop_in(hook, wish)
            raise
        except Exception as error:
            self.note_failure(error, hook, batch, start)
            raise
        finally:
            self._hooks._batch_samples = None

    def refuse_to_stop_in(self, hook: Callable[..., Any], wish: StopTrainingError) -> None:
        """Raise an error if other ranks wait for the output of `hook`: gradients, or what their callbacks gather."""
        if self._ranks.count > 1:
            raise HookOutputError(
                f"`{getattr(hook, '__name__', hook)}` raised StopTrainingError on rank {self._ranks.index} of "
                f"{self._ranks.count}, before it returned what the other ranks wait for. Raise it in the event after "
                "it, or later."
            ) from wish

    def note_failure(
        self, error: Exception, hook: Callable[..., Any], batch: Any = None, start: int | None = None
    ) -> None:
        """Add a note to an error: the hook, the batch and the position in the run."""
        name = getattr(hook, "__name__", "")
        if batch is None and name not in ("backward_step", "optimizer_step"):
            return
        hooks = self._hooks
        state = hooks.run_state
        number = state.batches_in_epoch - (name == "optimizer_step")  # its batches have been counted
        position = f"update {state.updates + 1} of the run, batch {number} of the epoch on this rank"
        if start is not None:
            position = f"after {state.updates} updates of the run, the batch that begins with sample {start}"
        note_failure(
            error,
            hook=name,
            batch=self.batch if batch is None else batch,
            position=f"epoch {hooks.run_history.current_epoch}, {position} (counted from 0)",
            rank=self._ranks.index,
            ranks=self._ranks.count,
        )
