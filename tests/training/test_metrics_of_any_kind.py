"""Scripts record dicts, confusion matrices and curves; a run shows, saves and judges by the numbers among them."""

import csv
import functools
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pytorch_accelerated import Trainer
from pytorch_accelerated.callbacks import (
    CSVLoggerCallback,
    EarlyStoppingCallback,
    JSONLoggerCallback,
    LogMetricsCallback,
    SaveBestModelCallback,
    SaveTrainingStateCallback,
    TrainerCallback,
)
from pytorch_accelerated.errors import ConfigurationError
from tests.support.reference import regression_data, tiny_trainer

DATA = regression_data(8)
a_trainer = functools.partial(tiny_trainer, seed=3)


class Opaque:
    """What no training state knows."""

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch


class Report(TrainerCallback):
    """Records what an evaluation script may: a dict with a curve, a confusion matrix, a score; `more` besides."""

    def __init__(self, **more: Any) -> None:
        self.more = more
        self.matrix = torch.zeros(2, 2, dtype=torch.int64)

    def on_eval_epoch_end(self, trainer: Trainer, **kwargs: Any) -> None:
        history = trainer.run_history
        self.matrix += 1
        history.update_metric("report", {"f1": 0.5, "curve": np.linspace(0, 1, 3), "labels": ["cat", "dog"]})
        history.update_metric("matrix", self.matrix)
        history.update_metric("score", torch.tensor(history.current_epoch / 4))
        for name, value in self.more.items():
            history.update_metric(name, value)


def fit(trainer: Trainer, num_epochs: int = 2, **arguments: Any) -> Any:
    return trainer.train(DATA, num_epochs, DATA, per_device_batch_size=4, **arguments)


def test_logs_have_the_numbers_and_the_history_has_everything(tmp_path: Path) -> None:
    logged: list[str] = []

    class Logger(LogMetricsCallback):
        def log_metrics(self, trainer: Trainer, metrics: dict[str, float]) -> None:
            assert all(type(value) is float for value in metrics.values())
            logged.extend(metrics)

    callbacks = [
        Report(),
        Logger(),
        CSVLoggerCallback(tmp_path / "log.csv", step_records=False),
        JSONLoggerCallback(tmp_path / "log.jsonl", step_records=False),
    ]
    history = fit(a_trainer(*callbacks))
    assert logged == ["train_loss_epoch", "eval_loss_epoch", "score"] * 2
    with (tmp_path / "log.csv").open() as file:
        rows = list(csv.DictReader(file))
    numbers = {"epoch", "update", "train_loss_epoch", "score", "eval_loss_epoch"}
    assert set(rows[0]) == numbers
    objects = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert {name for row in objects for name in row} == numbers
    assert [matrix.tolist() for matrix in history.get_metric_values("matrix")] == [[[1, 1], [1, 1]], [[2, 2], [2, 2]]]
    assert history.get_latest_metric("report")["labels"] == ["cat", "dog"]
    assert history.get_metric_values("score") == [0.25, 0.5]


@pytest.mark.parametrize("watches", ["best model", "early stopping", "states", "plateau"])
@pytest.mark.parametrize(("name", "type_name"), [("report", "dict"), ("matrix", "Tensor")])
def test_a_watched_metric_that_is_not_a_number_is_an_error_that_names_it(
    watches: str, name: str, type_name: str, tmp_path: Path
) -> None:
    watching: dict[str, Callable[..., TrainerCallback]] = {
        "best model": functools.partial(SaveBestModelCallback, tmp_path / "best.pt"),
        "early stopping": EarlyStoppingCallback,
        "states": functools.partial(SaveTrainingStateCallback, tmp_path, save_every_n_epochs=1, keep_best=1),
    }
    plateau: dict[str, Any] = {
        "create_scheduler_fn": torch.optim.lr_scheduler.ReduceLROnPlateau,
        "scheduler_metric": name,
    }
    callbacks = [watching[watches](watch_metric=name)] if watches in watching else []
    with pytest.raises(ConfigurationError, match=f"'{name}'.* is a {type_name}, .*under another name"):
        fit(a_trainer(Report(), *callbacks), **({} if callbacks else plateau))


def test_training_states_hold_what_can_be_stored(tmp_path: Path) -> None:
    report = Report()
    fit(a_trainer(report, SaveTrainingStateCallback(tmp_path, save_every_n_epochs=1)), num_epochs=1)
    again = Report()
    again.matrix = report.matrix
    resumed = fit(a_trainer(again), resume_from=tmp_path)
    assert [matrix.tolist() for matrix in resumed.get_metric_values("matrix")] == [[[1, 1], [1, 1]], [[2, 2], [2, 2]]]
    first, second = resumed.get_metric_values("report")
    assert first["curve"].tolist() == second["curve"].tolist() == [0, 0.5, 1]
    assert first["labels"] == ["cat", "dog"]


def test_values_that_cannot_be_stored_are_named_once_and_the_run_continues(tmp_path: Path) -> None:
    reader = CSVLoggerCallback(tmp_path / "log.csv", step_records=False)
    trainer = a_trainer(
        Report(opaque=Opaque(1)),
        reader,
        SaveTrainingStateCallback(tmp_path / "states", save_every_n_epochs=1),
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        history = fit(trainer)
    (message,) = [str(warning.message) for warning in caught if "Training states leave out" in str(warning.message)]
    assert "the metric 'opaque' (opaque is a tests.training.test_metrics_of_any_kind.Opaque)" in message
    assert len(history.get_metric_values("opaque")) == 2
    resumed = a_trainer(CSVLoggerCallback(tmp_path / "log.csv", step_records=False))
    resumed_history = fit(resumed, num_epochs=3, resume_from=tmp_path / "states" / "epoch_1")
    assert list(resumed_history.get_metric_values("opaque")) == []
    assert resumed_history.get_metric_values("score") == [0.25]
    with (tmp_path / "log.csv").open() as file:
        assert [row["epoch"] for row in csv.DictReader(file)] == ["1", "2", "3"]
