"""What is done with an exception that ends a run: a last training state, a better error, and word to the callbacks."""

from __future__ import annotations

import warnings
from pathlib import Path

from pytorch_accelerated.checkpointing.training_state import LiveRun, save_run
from pytorch_accelerated.checkpointing.weights import check_model_finite
from pytorch_accelerated.processes.ranks import Ranks, is_lost_contact, lost_peer_error
from pytorch_accelerated.progress.display import print_above_bars
from pytorch_accelerated.progress.screen import show
from pytorch_accelerated.steps.guarded import savers_among
from pytorch_accelerated.steps.safe_points import SafePoint
from pytorch_accelerated.training.emitting import Emitter
from pytorch_accelerated.training.hooks import TrainerHooks
from pytorch_accelerated.training.reports import LossReports
from pytorch_accelerated.training.saves import Saves


class Rescuer:
    """Saves what can be saved when an exception ends a run. No error of its own hides that exception.

    Args:
        hooks: the trainer.
        ranks: the processes.
        emitter: calls callbacks.
        saves: the training states of the run.
        reports: has the step records of the run.
    """

    def __init__(self, hooks: TrainerHooks, ranks: Ranks, emitter: Emitter, saves: Saves, reports: LossReports) -> None:
        self._hooks = hooks
        self._ranks = ranks
        self._emitter = emitter
        self._saves = saves
        self._reports = reports

    def save(self, point: SafePoint, exception: BaseException) -> None:
        """Save the run as it was at `point`, its last safe point, where callbacks want that."""
        savers = [each for each in savers_among(self._hooks.callback_handler) if each.save_on_exception]
        if not savers or not point.has_progress:
            return
        name = type(exception).__name__
        try:
            run = point.go_back()
            if run is None:
                self._print(
                    f"No training state was saved after this {name}: it came while an update was being applied."
                )
                return
            self._saves.finish()
            check_model_finite(self._hooks.model, self._ranks)
            self._complete_kept_records(run)
            for saver in savers:
                folder = Path(saver.save_dir) / "final"
                save_run(run, folder, {})
                self._saves.add(folder, run.history, run.run_state)
                position = run.run_state.position
                self._print(f"Saved the run as it was {position}, before this {name}. Resume it from {folder}")
        except BaseException as error:  # also an interrupt: the run ends anyway
            self._print(f"No training state could be saved after this {name}: {type(error).__name__}: {error}")

    def _complete_kept_records(self, run: LiveRun) -> None:
        """Add the step records that had ended at a safe point to the history, which the state of `run` will have."""
        if run.kept is not None and run.kept.history is None:
            self._reports.add_records()
        run.losses.take_parts()
        run.gradient_norms.take_parts()

    def _print(self, text: str) -> None:
        print_above_bars(self._ranks, text)

    def explained(self, exception: BaseException) -> BaseException:
        """The error to raise for `exception`: a better one, which is printed, if torch only says a connection broke."""
        if self._ranks.count == 1 or not is_lost_contact(exception):
            return exception
        error = lost_peer_error(
            exception,
            rank=self._ranks.index,
            size=self._ranks.count,
            updates=self._hooks.run_state.updates,
            newest=self._saves.newest(),
        )
        # On every rank, and now: the launcher is about to end this process, perhaps before Python prints the exception.
        show(error)
        return error

    def tell_of(self, exception: BaseException) -> None:
        """Emit `on_exception`."""
        try:
            self._emitter.emit("on_exception", exception=exception)
        except Exception as error:
            warnings.warn(
                f"A callback failed in `on_exception` with {type(error).__name__}: {error}. What ended the run is "
                f"another exception, a {type(exception).__name__}; callbacks after that one have not been told of it.",
                stacklevel=2,
            )
