"""A training run as a trial of an Optuna study: reported epoch by epoch, and ended if it is not worth going on."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytorch_accelerated.callbacks import TrainerCallback
from pytorch_accelerated.errors import StopTrainingError
from pytorch_accelerated.facts import require
from pytorch_accelerated.record import WatchedMetric

if TYPE_CHECKING:
    from pytorch_accelerated.loop.callback import Trainer


class OptunaCallback(TrainerCallback):
    """Reports a metric to an Optuna trial after each epoch. If the study prunes the trial, the run ends.

    ::

        def objective(trial):
            search = OptunaCallback(trial, folder="sweep")
            optimizer = torch.optim.AdamW(model.parameters(), lr=trial.suggest_float("lr", 1e-5, 1e-1, log=True))
            saving = SaveTrainingStateCallback(search.states)
            trainer = Trainer(model, loss_func, optimizer, callbacks=[*DEFAULT_CALLBACKS, saving, search])
            history = trainer.train(train_dataset, 10, eval_dataset, resume_from=search.states)
            return history.get_latest_metric("eval_loss_epoch")

        study = optuna.create_study(storage="sqlite:///sweep.db", study_name="digits", load_if_exists=True)
        study.optimize(objective, n_trials=20)

    A pruned run ends like one that a callback stops, and `train` then raises `optuna.TrialPruned`. On multiple ranks,
    the first one decides for all. A trial that Optuna's `RetryHeartbeatStaleTrialCallback` repeats has the folder of
    the first attempt, and so resumes.

    Put it last among the callbacks: those behind it would not hear of the end of a pruned run.

    Args:
        trial: the trial. Ranks other than the first need none.
        watch_metric: the metric's name in the run history. The study has the direction.
        folder: a folder for the training states of all trials.

    Attributes:
        states: the folder for the states of this trial; None without `folder`, or without a trial.
    """

    def __init__(self, trial: Any, watch_metric: str = "eval_loss_epoch", folder: str | Path | None = None) -> None:
        self._optuna = require("optuna", needed_by=type(self).__name__)
        self.trial = trial
        self.watch_metric = watch_metric
        self.states: Path | None = None
        if folder is not None and trial is not None:
            retried = _first_attempt(self._optuna.storages, trial)
            self.states = self._absolute(folder) / f"trial_{trial.number if retried is None else retried}"
        self._reported = 0  # the last epoch
        self._is_pruned = False

    def on_training_run_start(self, trainer: Trainer, **kwargs: Any) -> None:
        """Check the metric, and report the epochs of the run that is being resumed."""
        WatchedMetric(self.watch_metric).check_has_evaluation(trainer.eval_dataset)
        self._reported, self._is_pruned = 0, False
        for record in trainer.run_history.records:
            if record.name == self.watch_metric:
                self._report(float(record.value), record.epoch)

    def on_training_run_epoch_end(self, trainer: Trainer, **kwargs: Any) -> None:
        """Report the value of the epoch, and ask the study whether to continue.

        Raises:
            StopTrainingError: on all ranks, if it prunes the trial.
        """
        ranks = trainer.run_context.parts.ranks
        value = WatchedMetric(self.watch_metric).latest(trainer.run_history, ranks)
        if value is not None:
            self._report(value, trainer.run_history.current_epoch)
        self._is_pruned = ranks.from_first(self.trial is not None and bool(self.trial.should_prune()))
        if self._is_pruned:
            raise StopTrainingError(f"The study prunes this trial: {self.watch_metric} is {value}.")

    def on_training_run_end(self, trainer: Trainer, **kwargs: Any) -> None:
        """End a pruned trial.

        Raises:
            optuna.TrialPruned: on all ranks.
        """
        if self._is_pruned:
            raise self._optuna.TrialPruned(f"Pruned after epoch {self._reported}.")

    def _report(self, value: float, epoch: int) -> None:
        if epoch > self._reported:
            self._reported = epoch
            if self.trial is not None:
                self.trial.report(value, epoch)


def _first_attempt(storages: Any, trial: Any) -> int | None:
    """The number of the trial that this one repeats, if it does."""
    older = "RetryFailedTrialCallback"  # before Optuna 4.9
    retrying = getattr(storages, "RetryHeartbeatStaleTrialCallback", None) or getattr(storages, older)
    frozen = trial.study.get_trials(deepcopy=False)[trial.number]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is experimental since 2.8
        number: int | None = retrying.retried_trial_number(frozen)
    return number
