"""Calls the user's code, and stops all ranks together: at its request, a signal, a time limit, or a failed save.

`docs/design/stopping.md` has the reasons.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from pytorch_accelerated.data.updates import Round
from pytorch_accelerated.errors import HookOutputError, NonFiniteLossError, StopTrainingError
from pytorch_accelerated.facts.error_notes import note_failure
from pytorch_accelerated.loop.context import Asked, Control, Parts
from pytorch_accelerated.ranks.signals import SignalWatch
from pytorch_accelerated.record.step_records import Pace

# How long the other ranks may keep training once one must stop for a reason outside the update: a signal, a time limit,
# a failed save.
_SECONDS_BETWEEN_AGREEMENTS = 1.0
_BEFORE_COUNTING = ("calculate_train_batch_loss", "backward_step", "training_step")  # hooks of a batch


class Emitter:
    """Calls the user's code: callbacks and hooks. A request to stop is deferred until all ranks can stop together.

    `emit` calls callbacks, `call` a hook, `announce` both. `emit_at_once` doesn't defer. They all use
    `CallbackHandler.call_event`, which a subclass of it may override.

    Args:
        trainer: passed to callbacks.
        parts: of the call. They have the callbacks.

    Attributes:
        stop_request: the first deferred request to stop; None if there is none.
    """

    def __init__(self, trainer: Any, parts: Parts) -> None:
        self.stop_request: StopTrainingError | None = None
        self._trainer = trainer
        self._parts = parts

    def emit(self, event: str, **kwargs: Any) -> None:
        """Call the callbacks that handle `event`. A request to stop is deferred."""
        callbacks = self._parts.callbacks
        try:
            if callbacks.acts_at[event]:
                callbacks.call_event(event, self._trainer, **kwargs)
        except StopTrainingError as request:
            self.stop_request = self.stop_request or request

    def announce(self, hook: Callable[[], Any], event: str, **kwargs: Any) -> None:
        """Call `hook`, then the callbacks that handle `event`. A request to stop is deferred."""
        self.call(hook)
        self.emit(event, **kwargs)

    def emit_at_once(self, event: str, **kwargs: Any) -> None:
        """Call the callbacks that handle `event`. A request to stop is raised: all ranks must emit this event."""
        self._parts.callbacks.call_event(event, self._trainer, **kwargs)

    def call(self, hook: Callable[..., Any], *args: Any) -> None:
        """Call `hook`. A request to stop is deferred."""
        try:
            hook(*args)
        except StopTrainingError as request:
            self.stop_request = self.stop_request or request

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
        parts, name = self._parts, getattr(hook, "__name__", str(hook))
        state, ranks = parts.state, parts.ranks
        if isinstance(error, StopTrainingError):
            if ranks.count == 1:
                return
            raise HookOutputError(
                f"`{name}` raised StopTrainingError on rank {ranks.index}: others wait for it. Raise it in an event."
            ) from error
        number = state.batches_in_epoch + (name in _BEFORE_COUNTING)
        position = f"update {state.updates + 1} of the run, batch {number} of the epoch"
        if start is not None:
            position = f"after {state.updates} updates of the run, the batch that begins with row {start} (from 0)"
        note_failure(
            error,
            hook=name,
            batch=batch,
            position=f"epoch {parts.history.current_epoch}, {position}",
            rank=ranks.index,
            ranks=ranks.count,
        )


class Stopping:
    """Collects the reasons to stop on this rank, and makes all ranks agree on them.

    Args:
        asked: has the time limit.
        parts: of the call.
        control: has the deferred requests to stop, and the failures of background saves.

    Attributes:
        signals: the signals that this process received.
        began: when the call began, by `time.monotonic`.
        startup_seconds: from there to the end of the first update; None before that.
        failure: what will be raised once the run has ended, because a loss or parameter is not finite; else None.
    """

    def __init__(self, asked: Asked, parts: Parts, control: Control) -> None:
        self.signals = SignalWatch()
        self.began = time.monotonic()
        self.startup_seconds: float | None = None
        self.failure: NonFiniteLossError | None = None
        self._asked, self._parts, self._control = asked, parts, control
        self._pace = Pace(_SECONDS_BETWEEN_AGREEMENTS)
        self._deadline: float | None = None
        self._finishes_passes = False  # in passes that no resumed run would repeat

    def end_startup(self) -> None:
        """Start the clock of `max_duration`, if it isn't running: the first update of the call is complete."""
        if self.startup_seconds is None:
            now, seconds = time.monotonic(), self._asked.settings.max_seconds
            self.startup_seconds = now - self.began
            self._deadline = None if seconds is None else now + seconds

    def is_due(self, updates: int) -> bool:
        """Whether it is time to agree, after `updates` updates without a callback that could have asked to stop."""
        return self._pace.is_due(updates)

    def stop_if_asked(self) -> None:
        """Raise `StopTrainingError` on all ranks if any of them has a reason to stop. Must be called by all ranks."""
        emitter, ranks = self._control.emitter, self._parts.ranks
        if self._deadline is not None and time.monotonic() >= self._deadline and ranks.is_first:
            duration = self._asked.settings.max_duration
            emitter.stop_request = emitter.stop_request or StopTrainingError(f"`max_duration` ({duration}) is over.")
        is_asked = (
            emitter.stop_request is not None or self.signals.number or self._control.saves.writer.failure is not None
        )
        if self._finishes_passes or (ranks.count == 1 and not is_asked):
            return
        if self._agree(self._pace, self._parts.state.updates, emitter.stop_request is not None):
            request, emitter.stop_request = emitter.stop_request, None
            reasons = ranks.exchange("" if request is None else str(request))
            raise StopTrainingError(next(filter(None, [self.signals.reason, *reasons]), "")) from request

    def _agree(self, pace: Pace, done: int, wants_to_stop: bool) -> bool:
        """Whether any rank wants to stop or received a signal, after `done` updates or rounds."""
        has_failed = self._control.saves.writer.failure is not None
        numbers = [pace.proposal(done), wants_to_stop, has_failed, self.signals.number]
        proposals, requests, failures, signals = zip(*self._parts.ranks.exchange_numbers(numbers), strict=True)
        pace.go_on(done, between=proposals[0])
        if any(failures):
            self._control.saves.finish()  # warns, or raises the failure on all ranks
        return self.signals.agree(signals) or any(requests)

    def until_signal(self, rounds: Iterable[Round], give_up: Callable[[str], BaseException]) -> Iterator[Round]:
        """The rounds of a pass; all ranks stop before the same round if any of them received a signal.

        Args:
            rounds: the rounds of the pass.
            give_up: creates the error that is raised then, from the reason.
        """
        pace = Pace(_SECONDS_BETWEEN_AGREEMENTS)
        for number, round_ in enumerate(rounds):
            is_due = self.signals.number if self._parts.ranks.count == 1 else pace.is_due(number)
            if is_due and not self._finishes_passes and self._agree(pace, number, False):
                raise give_up(self.signals.reason)
            yield round_

    @contextlib.contextmanager
    def finishing_passes(self) -> Iterator[None]:
        """Finish the evaluations and predictions inside this context, which no resumed run would repeat."""
        before, self._finishes_passes = self._finishes_passes, True
        try:
            yield
        finally:
            self._finishes_passes = before
