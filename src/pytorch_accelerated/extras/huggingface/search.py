"""`hyperparameter_search` of the Hugging Face trainer: a study of Optuna, whose trials are runs of the trainer."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from pytorch_accelerated.errors import ConfigurationError
from pytorch_accelerated.facts import require
from pytorch_accelerated.huggingface import TrainerCallback

if TYPE_CHECKING:
    from pytorch_accelerated.huggingface import Trainer

_NOT_METRICS = ("_runtime", "_per_second", "_compilation_time", "_preparation_time")


class BestRun(NamedTuple):
    """The best trial of a search.

    Attributes:
        run_id: its number.
        objective: its value; a list of several objectives.
        hyperparameters: by name.
        run_summary: always None.
    """

    run_id: str
    objective: float | list[float]
    hyperparameters: dict[str, Any]
    run_summary: Any = None


def default_hp_space(trial: Any) -> dict[str, Any]:
    """The space that is searched by default: rate, epochs, seed and batch size."""
    return {
        "learning_rate": trial.suggest_float("learning_rate", 1e-6, 1e-4, log=True),
        "num_train_epochs": trial.suggest_int("num_train_epochs", 1, 5),
        "seed": trial.suggest_int("seed", 1, 40),
        "per_device_train_batch_size": trial.suggest_categorical("per_device_train_batch_size", [4, 8, 16, 32, 64]),
    }


def default_compute_objective(metrics: Mapping[str, float]) -> float:
    """The sum of the metrics; the loss of the evaluation, if there are no others."""
    others = {name: value for name, value in metrics.items() if name not in ("eval_loss", "epoch")}
    others = {name: value for name, value in others.items() if not name.endswith(_NOT_METRICS)}
    return metrics["eval_loss"] if not others else sum(others.values())


def search(
    face: Trainer,
    folder: Path,
    hp_space: Callable[[Any], dict[str, Any]] | None,
    compute_objective: Callable[[dict[str, float]], Any] | None,
    n_trials: int,
    direction: str | list[str],
    hp_name: Callable[[Any], str] | None,
    **kwargs: Any,
) -> BestRun | list[BestRun]:
    """The best of many runs, which save below `folder`; see `Trainer.hyperparameter_search`."""
    hp_space, compute_objective = hp_space or default_hp_space, compute_objective or default_compute_objective
    optuna = require("optuna", needed_by="`hyperparameter_search`")
    if face.model_init is None:
        raise ConfigurationError("`hyperparameter_search` makes a new model for each trial. Pass `model_init`.")
    if face.args.world_size > 1:
        raise ConfigurationError(
            "`hyperparameter_search` runs on one process. Start several of them with one `storage` instead."
        )
    given, best_args = face.args, copy.copy(face.args)
    for_optimize = {
        name: kwargs.pop(name) for name in ("timeout", "n_jobs", "gc_after_trial", "catch") if name in kwargs
    }

    def objective(trial: Any) -> Any:
        face.args = copy.copy(given)
        for name, value in hp_space(trial).items():
            if not hasattr(given, name):
                raise ConfigurationError(f"`hp_space` has {name!r}, which is not an argument. Use names of arguments.")
            setattr(face.args, name, type(getattr(given, name) or value)(value))
        face.args.output_dir = str(folder / f"run-{trial.number}")
        reporting = _Reporting(trial, optuna, compute_objective)
        face.add_callback(reporting)
        try:
            face.train(trial=trial)
            face.state.trial_name = None if hp_name is None else hp_name(trial)
        finally:
            face.pop_callback(reporting)
        if reporting.is_pruned:
            raise optuna.TrialPruned()
        return reporting.objective if reporting.objective is not None else compute_objective(face.evaluate())

    directions = {"directions": direction} if isinstance(direction, list) else {"direction": direction}
    study = optuna.create_study(**directions, **kwargs)
    try:
        study.optimize(objective, n_trials=n_trials, **for_optimize)
    finally:
        face.args = best_args
    if isinstance(direction, list):
        return [BestRun(str(best.number), best.values, best.params) for best in study.best_trials]
    return BestRun(str(study.best_trial.number), study.best_value, study.best_params)


class _Reporting(TrainerCallback):
    """Tells a trial about evaluations, and ends its run if it is pruned."""

    def __init__(self, trial: Any, optuna: Any, compute_objective: Callable[[dict[str, float]], Any]) -> None:
        self._trial = trial
        self._optuna = optuna
        self._compute_objective = compute_objective
        self.objective: Any = None
        self.is_pruned = False

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any) -> None:
        """Report the objective."""
        self.objective = self._compute_objective(dict(metrics))
        if isinstance(self.objective, (int, float)):
            self._trial.report(self.objective, state.global_step)
            self.is_pruned = self._trial.should_prune()
            control.should_training_stop |= self.is_pruned
