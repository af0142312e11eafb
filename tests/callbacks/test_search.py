"""Runs as trials of an Optuna study."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pytorch_accelerated import Trainer
from pytorch_accelerated.callbacks import OptunaCallback, SaveTrainingStateCallback, TrainerCallback
from tests.callbacks.runs import Die, DieAfter
from tests.support.processes import run_on_ranks

optuna = pytest.importorskip("optuna")
INPUTS = torch.randn(32, 3, generator=torch.Generator().manual_seed(0))
ROWS = (INPUTS, INPUTS.sum(1, keepdim=True))


@pytest.fixture(autouse=True)
def _quiet() -> None:
    optuna.logging.set_verbosity(optuna.logging.ERROR)


def run(trial: Any, *callbacks: Any, lr: float, epochs: int = 4, **arguments: Any) -> float:
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    trainer = Trainer(model, nn.MSELoss(), torch.optim.SGD(model.parameters(), lr), callbacks=callbacks, seed=0)
    history = trainer.train(ROWS, epochs, ROWS, **arguments)
    return float(history.get_latest_metric("eval_loss_epoch"))


def test_each_epoch_is_reported_and_the_best_rate_is_found() -> None:
    study = optuna.create_study(sampler=optuna.samplers.GridSampler({"lr": [1e-4, 1e-1]}))
    study.optimize(lambda trial: run(trial, OptunaCallback(trial), lr=trial.suggest_float("lr", 1e-5, 1.0)), n_trials=2)
    assert study.best_params == {"lr": 0.1}
    for trial in study.trials:
        assert list(trial.intermediate_values) == [1, 2, 3, 4]
        assert trial.intermediate_values[4] == trial.value


def test_a_pruned_trial_ends_its_run_in_order_and_counts_as_pruned() -> None:
    class Heard(TrainerCallback):
        def __init__(self) -> None:
            self.events: list[str] = []

        def on_stop_training_error(self, trainer: Trainer, **kwargs: Any) -> None:
            self.events.append("stopped")

        def on_training_run_end(self, trainer: Trainer, **kwargs: Any) -> None:
            self.events.append("ended")

    heard = Heard()
    study = optuna.create_study(pruner=optuna.pruners.ThresholdPruner(upper=1e-9, n_warmup_steps=2))
    study.optimize(lambda trial: run(trial, heard, OptunaCallback(trial), lr=0.01), n_trials=1)
    (trial,) = study.trials
    assert trial.state is optuna.trial.TrialState.PRUNED
    assert list(trial.intermediate_values) == [1, 2]
    assert heard.events == ["stopped", "ended"]


@pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")
def test_a_trial_that_is_repeated_resumes_from_the_states_of_the_first_attempt(tmp_path: Path) -> None:
    storage = optuna.storages.RDBStorage(f"sqlite:///{tmp_path / 'sweep.db'}")
    study = optuna.create_study(storage=storage)
    again = optuna.storages.RetryHeartbeatStaleTrialCallback()

    def objective(trial: Any, *callbacks: Any) -> float:
        search = OptunaCallback(trial, folder=tmp_path / "sweep")
        assert search.states is not None
        saving = SaveTrainingStateCallback(search.states)
        rate = trial.suggest_float("lr", 0.01, 0.1)
        return run(trial, saving, *callbacks, search, lr=rate, resume_from=search.states)

    study.optimize(lambda trial: objective(trial, DieAfter(8)), n_trials=1, catch=Die)
    again(study, study.trials[0])
    study.optimize(objective, n_trials=1)
    first, second = study.trials
    assert second.params == first.params
    assert list(first.intermediate_values) == [1, 2]
    assert list(second.intermediate_values) == [1, 2, 3, 4]
    assert second.intermediate_values[2] == first.intermediate_values[2]
    whole = run(None, lr=first.params["lr"])
    assert second.value == pytest.approx(whole, rel=1e-6)


WORKER = """
import sys, torch, optuna
from torch import nn
from pytorch_accelerated import Trainer
from pytorch_accelerated.callbacks import OptunaCallback
optuna.logging.set_verbosity(optuna.logging.ERROR)
inputs = torch.randn(32, 3)
def objective(trial):
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), trial.suggest_float("lr", 1e-4, 0.1))
    trainer = Trainer(model, nn.MSELoss(), optimizer, callbacks=[OptunaCallback(trial)])
    trainer.train((inputs, inputs[:, :1]), 2, (inputs, inputs[:, :1]))
    return trainer.run_history.get_latest_metric("eval_loss_epoch")
pruner = optuna.pruners.NopPruner()
study = optuna.load_study(study_name="shared", storage=sys.argv[1], pruner=pruner)
study.optimize(objective, n_trials=3)
"""


@pytest.mark.processes
def test_several_processes_share_a_study(tmp_path: Path) -> None:
    storage = f"sqlite:///{tmp_path / 'sweep.db'}"
    pruner = optuna.pruners.NopPruner()
    study = optuna.create_study(study_name="shared", storage=storage, pruner=pruner)
    run_on_ranks(WORKER, 2, storage, launcher=[{}, {}])  # neither knows of the other
    assert [trial.state for trial in study.trials] == [optuna.trial.TrialState.COMPLETE] * 6
    assert all(list(trial.intermediate_values) == [1, 2] for trial in study.trials)
