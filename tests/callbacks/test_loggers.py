"""Logs in files: whole at any time, and the same after a resume."""

import csv
import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pytorch_accelerated.callbacks import CSVLoggerCallback, JSONLoggerCallback, LearningRateMonitorCallback, loggers
from pytorch_accelerated.callbacks.evaluation import StepBasedEvaluationCallback
from pytorch_accelerated.loop.callback import TrainerCallback
from pytorch_accelerated.trainer import Trainer
from tests.support.reference import regression_data, sgd, tiny_model
from tests.support.resuming import SaveAndStop


def trainer_with(*callbacks: Any, trainer_class: type[Trainer] = Trainer) -> Trainer:
    model = tiny_model()
    return trainer_class(model, nn.MSELoss(), sgd(model), callbacks=callbacks, seed=1)


def train(trainer: Trainer, num_epochs: int = 2, data: Any = None, **kwargs: Any) -> None:
    """By default, 5 updates an epoch."""
    trainer.train(data or regression_data(20), num_epochs, regression_data(8), per_device_batch_size=4, **kwargs)


def all_of_csv(path: Path) -> list[dict[str, float]]:
    """The rows without their empty cells."""
    with open(path, newline="") as file:
        rows = list(csv.DictReader(file, restkey="too many", restval="nan nan"))  # which is not a number
    return [{name: float(value) for name, value in row.items() if value} for row in rows]


def all_of_json(path: Path) -> list[dict[str, float]]:
    rows = [json.loads(line, parse_constant=pytest.fail) for line in path.read_text().splitlines()]
    return [{name: float(value) for name, value in row.items()} for row in rows]


def read_csv(path: Path) -> list[dict[str, float]]:
    """The rows of metrics."""
    return [row for row in all_of_csv(path) if "train_loss" not in row]


def read_json(path: Path) -> list[dict[str, float]]:
    return [row for row in all_of_json(path) if "train_loss" not in row]


ALL = {read_csv: all_of_csv, read_json: all_of_json}
TIMES = ("seconds", "samples_per_second", "data_wait_share", "peak_memory")
LOGGERS = [(CSVLoggerCallback, read_csv), (JSONLoggerCallback, read_json)]
both_loggers = pytest.mark.parametrize(("logger_class", "read"), LOGGERS)


def without_times(rows: list[dict[str, float]]) -> list[dict[str, float]]:
    return [{name: value for name, value in row.items() if name not in TIMES} for row in rows]


def expected_rows(trainer: Trainer, *moments: tuple[int, int]) -> list[dict[str, float]]:
    """What the history holds, by epoch and update."""
    return [
        {"epoch": epoch, "update": update}
        | {record.name: record.value for record in trainer.run_history.records if record[2:] == (epoch, update)}
        for epoch, update in moments
    ]


@both_loggers
def test_every_value_is_logged_exactly_in_the_row_of_its_moment(logger_class, read, tmp_path):
    path = tmp_path / "new" / "folder" / "log"
    trainer = trainer_with(StepBasedEvaluationCallback(3), logger_class(path))
    train(trainer)
    rows = read(path)
    assert rows == expected_rows(trainer, (1, 3), (1, 5), (2, 6), (2, 9), (2, 10))
    assert sum(len(row) - 2 for row in rows) == len(trainer.run_history.records) == 7


@both_loggers
def test_the_values_of_an_evaluation_after_training_share_a_row(logger_class, read, tmp_path):
    class Squares(TrainerCallback):
        def on_eval_epoch_end(self, trainer: Any, **kwargs: Any) -> None:
            trainer.run_history.update_metric("eval_square", 4.0)

    trainer = trainer_with(Squares(), logger_class(tmp_path / "log"))
    train(trainer)
    before = read(tmp_path / "log")
    loss = trainer.evaluate(regression_data(8))["evaluation_loss"]
    evaluated = {"epoch": 2, "update": 10, "eval_square": 4.0, "evaluation_loss": loss}
    assert read(tmp_path / "log") == [*before, evaluated]


@both_loggers
def test_values_that_are_not_finite_survive(logger_class, read, tmp_path):
    class NotFinite(TrainerCallback):
        def on_train_epoch_end(self, trainer: Trainer, **kwargs: Any) -> None:
            for name, value in {"a": math.nan, "b": math.inf, "c": -math.inf}.items():
                trainer.run_history.update_metric(name, value)

    train(trainer_with(NotFinite(), logger_class(tmp_path / "log")), 1)
    (row,) = read(tmp_path / "log")
    assert math.isnan(row["a"])
    assert (row["b"], row["c"]) == (math.inf, -math.inf)


@both_loggers
def test_the_file_is_up_to_date_when_the_evaluation_fails(logger_class, read, tmp_path):
    class Fails(Trainer):
        def calculate_eval_batch_loss(self, batch: Any) -> dict[str, Any]:
            (row,) = read(tmp_path / "log")
            assert row["train_loss_epoch"] == self.run_history.get_latest_metric("train_loss_epoch")
            raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        train(trainer_with(logger_class(tmp_path / "log"), trainer_class=Fails))


@both_loggers
@pytest.mark.parametrize("resume_after", [1, 3, 5, 8])
def test_the_log_of_a_resumed_run_equals_that_of_the_uninterrupted_one(logger_class, read, resume_after, tmp_path):
    log = tmp_path / "log"

    def run(*callbacks: Any, **kwargs: Any) -> list[dict[str, float]]:
        train(trainer_with(StepBasedEvaluationCallback(3), logger_class(log), *callbacks), 3, **kwargs)
        return ALL[read](log)

    whole, columns = run(), log.read_text().splitlines()[0]
    run(SaveAndStop(tmp_path / "state", resume_after))
    again = run(resume_from=tmp_path / "state")
    assert without_times(again) == without_times(whole)
    assert logger_class is JSONLoggerCallback or log.read_text().splitlines()[0] == columns
    seconds = [row["seconds"] for row in again if "train_loss" in row]
    assert seconds == sorted(seconds)


@both_loggers
def test_a_disk_that_refuses_costs_a_warning_and_not_the_run(logger_class, read, tmp_path, monkeypatch):
    path = tmp_path / "log"
    real_fsync, refuse = os.fsync, True

    def fsync(descriptor: int) -> None:
        if refuse:
            raise OSError(28, "No space left on device")
        real_fsync(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    trainer = trainer_with(logger_class(path))
    with pytest.warns(UserWarning, match=r"failed in .*No space left.*The run continues, and tries again"):
        train(trainer)
    assert list(tmp_path.iterdir()) == []
    refuse = False
    trainer.evaluate(regression_data(8))
    assert ["evaluation_loss" in row for row in read(path)] == [False, False, True]


# After 64 updates, after 128, and at the end of an epoch.
@pytest.mark.parametrize(("seconds", "rows_seen"), [(0.0, [4, 8, 10, 15, 19, 21]), (1e9, [4, 4, 4, 11, 11, 11])])
@both_loggers
def test_step_records_have_rows_of_their_own_and_the_file_grows_within_an_epoch(
    logger_class, read, seconds, rows_seen, tmp_path, monkeypatch
):
    monkeypatch.setattr(loggers, "_SECONDS_BETWEEN_WRITES", seconds)
    path = tmp_path / "log"
    seen: list[int] = []

    class Look(TrainerCallback):
        def on_step_records(self, trainer: Trainer, **kwargs: Any) -> None:
            seen.append(len(ALL[read](path)))

    model = tiny_model()
    groups = torch.optim.SGD([{"params": [each], "lr": 0.01 * (n + 1)} for n, each in enumerate(model.parameters())])
    callbacks = [logger_class(path), LearningRateMonitorCallback(), Look()]
    trainer = Trainer(model, nn.MSELoss(), groups, callbacks=callbacks)
    history = trainer.train(
        regression_data(4 * 150), 2, per_device_batch_size=4, gradient_clip_norm=1.0, record_every_n_steps=16
    )
    assert seen == rows_seen
    rows = ALL[read](path)
    steps = [row for row in rows if "train_loss" in row]
    assert steps == [record.columns() for record in history.step_records]
    assert len(steps) == 20
    assert {"learning_rate", "learning_rate_1", "gradient_norm"} <= steps[0].keys()
    assert [row["update"] for row in rows] == [*range(16, 150, 16), 150, 150, *range(166, 300, 16), 300, 300]
    assert rows[10].keys() == {"epoch", "update", "train_loss_epoch", "gradient_norm", *steps[0]} - {
        "samples",
        "train_loss",
        *TIMES,
    }


@both_loggers
def test_names_are_text_in_spreadsheets_and_break_no_row(logger_class, read, tmp_path):
    names = ["score", "=HYPERLINK(1)", "+1", "-1", "@sum", "a\rb", "c\nd", "\x1b[2J", "\udc80", "模型"]

    class Later(TrainerCallback):
        def on_training_run_epoch_end(self, trainer: Trainer, **kwargs: Any) -> None:
            for number, name in enumerate(names[: 5 * trainer.run_history.current_epoch]):
                trainer.run_history.update_metric(name, number)

    train(trainer_with(logger_class(tmp_path / "log", step_records=False), Later()))
    first, second = read(tmp_path / "log")
    known = {"epoch", "update", "train_loss_epoch", "eval_loss_epoch"}
    assert [len(row.keys() - known) for row in (first, second)] == [5, 10]
    assert [value for name, value in second.items() if name not in known] == list(range(10))
    if logger_class is CSVLoggerCallback:
        lines = (tmp_path / "log").read_bytes().decode().splitlines()
        assert len(lines) == 3
        assert lines[0].split(",")[4:] == [
            *["score", "'=HYPERLINK(1)", "'+1", "'-1", "'@sum"],
            *["a\\rb", "c\\nd", "\\x1b[2J", "\\udc80", "模型"],
        ]


# The learning rate


def test_the_learning_rate_after_each_epoch_is_recorded():
    trainer = trainer_with(LearningRateMonitorCallback)
    train(trainer, 3, create_scheduler_fn=lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5))
    expected = [0.1 * 0.5**updates for updates in (5, 10, 15)]
    assert trainer.run_history.get_metric_values("learning_rate") == pytest.approx(expected)
    assert list(trainer.run_history.get_metric_names()) == ["train_loss_epoch", "learning_rate", "eval_loss_epoch"]
