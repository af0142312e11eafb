"""What is done with an exception that ends a run: a last training state, a better error, and word to the callbacks."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING

from pytorch_accelerated.checkpointing.training_state import save_run
from pytorch_accelerated.processes.ranks import is_lost_contact, lost_peer_error
from pytorch_accelerated.progress.text import show
from pytorch_accelerated.steps.guarded import savers_among

if TYPE_CHECKING:
    from pytorch_accelerated.facts.context import Context


class Rescuer:
    """Saves what can be saved when an exception ends a run. No error of its own hides that exception.

    Args:
        context: of the run.
    """

    def __init__(self, context: Context) -> None:
        self._context = context

    def save(self, exception: BaseException) -> None:
        """Save the run as it was at its last safe point, where callbacks want that."""
        training = self._context.training
        point = None if training is None else training.safe_point
        savers = [each for each in savers_among(self._context.callbacks) if each.save_on_exception]
        if point is None or not savers or not point.has_progress:
            return
        training.safe_point = None
        name = type(exception).__name__
        try:
            run = point.go_back()
            if run is None:
                self._context.print(
                    f"No training state was saved after this {name}: it came while an update was being applied."
                )
                return
            self._context.saves.finish()
            self._context.states.check_finite()
            self._complete_kept_records(run)
            for saver in savers:
                folder = Path(saver.save_dir) / "final"
                save_run(run, folder, {})
                self._context.saves.add(folder, run.history, run.state)
                position = run.state.position
                self._context.print(f"Saved the run as it was {position}, before this {name}. Resume it from {folder}")
        except BaseException as error:  # also an interrupt: the run ends anyway
            self._context.print(f"No training state could be saved after this {name}: {type(error).__name__}: {error}")

    def _complete_kept_records(self, run: Context) -> None:
        """Add the step records that had ended at a safe point to the history, which the state of `run` will have."""
        if run.kept is not None and run.kept.history is None:
            self._context.reports.add_records()
        run.losses.take_parts()
        run.gradient_norms.take_parts()

    def explained(self, exception: BaseException) -> BaseException:
        """The error to raise for `exception`: a better one, which is printed, if torch only says a connection broke."""
        if self._context.ranks.count == 1 or not is_lost_contact(exception):
            return exception
        error = lost_peer_error(
            exception,
            rank=self._context.ranks.index,
            size=self._context.ranks.count,
            updates=self._context.state.updates,
            newest=self._context.saves.newest(),
        )
        # On every rank, and now: the launcher is about to end this process, perhaps before Python prints the exception.
        show(error)
        return error

    def tell_of(self, exception: BaseException) -> None:
        """Emit `on_exception`."""
        try:
            self._context.emitter.emit("on_exception", exception=exception)
        except Exception as error:
            warnings.warn(
                f"A callback failed in `on_exception` with {type(error).__name__}: {error}. What ended the run is "
                f"another exception, a {type(exception).__name__}; callbacks after that one have not been told of it.",
                stacklevel=2,
            )
