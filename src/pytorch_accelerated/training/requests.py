"""Evaluations and saves requested by callbacks, kept until the next safe point."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from pytorch_accelerated.training.run_state import RunState


class Requests:
    """Keeps requests and serves them in a fixed order: first the evaluation, then the saves.

    Args:
        evaluate: evaluates within a training epoch.
        write_state: writes a training state, given a folder, further entries, and whether to write in the background.

    Attributes:
        evaluation: whether an evaluation was requested.
        states: the requested training states.
        defers_saves: whether saves must wait for a safe point: only training has moments that cannot be saved.
    """

    def __init__(self, evaluate: Callable[[], None], write_state: Callable[[Path, dict[str, Any], bool], None]) -> None:
        self.evaluation = False
        self.states: list[tuple[Path, dict[str, Any], bool]] = []
        self.defers_saves = False
        self._evaluate = evaluate
        self._write_state = write_state

    @contextlib.contextmanager
    def deferring_saves(self) -> Iterator[None]:
        """Context in which saves wait for a safe point; the end of the outermost one is such a point."""
        before, self.defers_saves = self.defers_saves, True
        try:
            yield
        finally:
            self.defers_saves = before
        if not before:
            self.write_states()

    def act(self, state: RunState) -> None:
        """Serve the requests. Must be called by all ranks."""
        if self.evaluation or state.is_evaluation_due:
            self.evaluation, state.is_evaluation_due = False, True
            self._evaluate()
            state.is_evaluation_due = False
        self.write_states()

    def write_states(self) -> None:
        """Write the requested states."""
        while self.states:
            self._write_state(*self.states.pop(0))

    def forget(self) -> None:
        """Forget everything: the run goes back to an earlier state."""
        self.evaluation = False
        self.states.clear()
