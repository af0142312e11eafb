"""What is done with an exception that ends a run: a last training state, a better error, and word to the callbacks.

No error of its own hides that exception.
"""

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


def save_after(context: Context, exception: BaseException) -> None:
    """Save the run as it was at its last safe point, where callbacks want that."""
    training = context.training
    point = None if training is None else training.safe_point
    savers = [each for each in savers_among(context.callbacks) if each.save_on_exception]
    if point is None or not savers or not point.has_progress:
        return
    training.safe_point = None
    name = type(exception).__name__
    try:
        run = point.go_back()
        if run is None:
            context.print(f"No training state was saved after this {name}: it came while an update was being applied.")
            return
        context.saves.finish()
        context.states.check_finite()
        if run.kept is not None and run.kept.history is None:
            context.reports.add_records()  # those that had ended, to the history that the state will have
        run.losses.take_parts()
        run.gradient_norms.take_parts()
        for saver in savers:
            folder = Path(saver.save_dir) / "final"
            save_run(run, folder, {})
            context.saves.add(folder, run.history, run.state)
            context.print(f"Saved the run as it was {run.state.position}, before this {name}. Resume it from {folder}")
    except BaseException as error:  # also an interrupt: the run ends anyway
        context.print(f"No training state could be saved after this {name}: {type(error).__name__}: {error}")


def explained(context: Context, exception: BaseException) -> BaseException:
    """The error to raise for `exception`: a better one, which is printed, if torch only says a connection broke."""
    ranks = context.ranks
    if ranks.count == 1 or not is_lost_contact(exception):
        return exception
    updates, newest = context.state.updates, context.saves.newest()
    error = lost_peer_error(exception, rank=ranks.index, size=ranks.count, updates=updates, newest=newest)
    # On every rank, and now: the launcher is about to end this process, perhaps before Python prints the exception.
    show(error)
    return error


def tell_of(context: Context, exception: BaseException) -> None:
    """Emit `on_exception`."""
    try:
        context.emitter.emit("on_exception", exception=exception)
    except Exception as error:
        warnings.warn(
            f"A callback failed in `on_exception` with {type(error).__name__}: {error}. What ended the run is "
            f"another exception, a {type(exception).__name__}; callbacks after that one have not been told of it.",
            stacklevel=2,
        )
