"""Watched names without a value at the end of the first epoch are an error; others are not. Which value is the best."""

import contextlib
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torchmetrics
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from pytorch_accelerated.callbacks import LearningRateMonitorCallback
from pytorch_accelerated.callbacks.defaults import DEFAULT_CALLBACKS
from pytorch_accelerated.callbacks.evaluation import StepBasedEvaluationCallback
from pytorch_accelerated.callbacks.metrics import MetricsCallback
from pytorch_accelerated.callbacks.saving import SaveBestModelCallback, SaveTrainingStateCallback
from pytorch_accelerated.callbacks.stopping import EarlyStoppingCallback
from pytorch_accelerated.callbacks.weights import ModelEmaCallback
from pytorch_accelerated.errors import UnknownMetricError
from pytorch_accelerated.loop.callback import TrainerCallback
from pytorch_accelerated.record.watching import best_record
from pytorch_accelerated.tracking import InMemoryRunHistory, RunHistory
from pytorch_accelerated.trainer import Trainer

DATA = torch.randn(20, 4, generator=torch.Generator().manual_seed(1)), torch.arange(20) % 2
SETS = {"clean": DATA, "noisy": (DATA[0] + 1, DATA[1])}


def make_trainer(*callbacks: Any, trainer_class: type[Trainer] = Trainer) -> Trainer:
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return trainer_class(model, nn.CrossEntropyLoss(), optimizer, [*callbacks, *DEFAULT_CALLBACKS], seed=1)


def accuracy(predictions: torch.Tensor, targets: torch.Tensor) -> float:
    return float((predictions == targets).float().mean())


def several(predictions: torch.Tensor, targets: torch.Tensor) -> Any:
    return {"best": 1.0, "worst": accuracy(predictions, targets)}


def metrics() -> MetricsCallback:
    exact = torchmetrics.Accuracy(task="multiclass", num_classes=2)
    return MetricsCallback({"accuracy": accuracy, "exact": exact, "scores": several}, predictions="argmax")


def watching(name: str) -> EarlyStoppingCallback:
    return EarlyStoppingCallback(5, watch_metric=name, greater_is_better="loss" not in name)


MISSPELT = "eval_noisy_los_epoch"
WATCHING: dict[str, tuple[Callable[[], TrainerCallback], dict[str, Any]]] = {
    "early stopping": (lambda: watching(MISSPELT), {}),
    "states": (lambda: SaveTrainingStateCallback(keep_best=1, watch_metric=MISSPELT), {}),
    "best model": (lambda: SaveBestModelCallback(watch_metric=MISSPELT), {}),
    "average": (lambda: ModelEmaCallback(watch_metric=MISSPELT), {}),
    "schedule": (TrainerCallback, {"create_scheduler_fn": ReduceLROnPlateau, "scheduler_metric": MISSPELT}),
}


@pytest.mark.parametrize(("make", "arguments"), WATCHING.values(), ids=WATCHING)
def test_a_misspelt_name_is_an_error_at_the_end_of_the_first_epoch(make, arguments):
    trainer = make_trainer(make())
    with pytest.raises(UnknownMetricError, match="no value. Watch one of .*'eval_noisy_loss_epoch'"):
        trainer.train(DATA, 2, SETS, **arguments)
    assert trainer.run_state.updates == 3  # one epoch


class Recording(TrainerCallback):
    def on_eval_epoch_end(self, trainer: Trainer, **kwargs: Any) -> None:
        trainer.run_history.update_metric("eval_own", 1.0)


def ema_of_own() -> ModelEmaCallback:
    return ModelEmaCallback(callbacks=[Recording])


@pytest.mark.parametrize(
    ("name", "callbacks", "sets"),
    [
        ("train_loss_epoch", (), None),
        ("eval_noisy_own", (Recording,), SETS),
        ("train_exact", (metrics,), DATA),
        ("eval_worst", (metrics,), DATA),
        ("ema_model_eval_own", (ema_of_own,), DATA),
        ("ema_model_eval_noisy_loss_epoch", (ModelEmaCallback,), SETS),
        ("intermediate_eval_loss", (lambda: StepBasedEvaluationCallback(2),), DATA),
        ("intermediate_eval_noisy_accuracy", (metrics, lambda: StepBasedEvaluationCallback(2)), SETS),
        ("learning_rate", (LearningRateMonitorCallback,), DATA),
    ],
)
def test_a_name_that_may_be_recorded_is_no_error(name, callbacks, sets):
    trainer = make_trainer(*(make() for make in callbacks), watching(name))
    trainer.train(DATA, 1, sets)
    assert name in trainer.run_history.get_metric_names()


def history(**metrics: list[float]) -> RunHistory:
    found = InMemoryRunHistory()
    for epoch in range(max(map(len, metrics.values()))):
        for name, values in metrics.items():
            found.update_metric(name, values[epoch])
        found._increment_epoch()
    return found


def best(found: RunHistory, **watched: bool) -> tuple[str, float, int] | None:
    record = best_record(found, watched)
    return None if record is None else (record.name, record.value, record.epoch)


def test_watched_metrics_come_first_then_the_evaluation_loss_then_what_its_name_explains() -> None:
    found = history(
        train_loss_epoch=[3.0, 2.0, 1.0],
        eval_accuracy=[0.5, 0.9, 0.9],
        eval_loss_epoch=[2.0, math.nan, 2.5],
        eval_margin=[1.0, 2.0, 3.0],
    )
    assert best(found, missing=True, eval_margin=True) == ("eval_margin", 3.0, 3)
    assert best(found) == ("eval_loss_epoch", 2.0, 1)
    assert best(found, eval_accuracy=True) == ("eval_accuracy", 0.9, 2), "the first of equal values"
    assert best(history(train_loss_epoch=[2.0, 1.0], eval_f1=[0.7, 0.6])) == ("eval_f1", 0.7, 1)


def test_training_without_an_evaluation_has_no_best_epoch() -> None:
    assert best(history(train_loss_epoch=[2.0, 1.0])) is None
    assert best(history(train_loss_epoch=[2.0, 1.0]), train_loss_epoch=False) == ("train_loss_epoch", 1.0, 2)


class Accuracy(TrainerCallback):
    def on_eval_epoch_end(self, trainer: Trainer, **kwargs: Any) -> None:
        trainer.run_history.update_metric("eval_accuracy", 0.5)
        trainer.run_history.update_metric("eval_score", 0.5)


@pytest.mark.parametrize("kind", ["stop", "best", "states"])
@pytest.mark.parametrize(
    ("name", "greater", "words"),
    [
        (
            "eval_accuracy",
            False,
            "so the lowest value counts as the best, .*more is better. Pass `greater_is_better=True`",
        ),
        (
            "eval_loss_epoch",
            True,
            "so the highest value counts as the best, .*less is better. Pass `greater_is_better=False`",
        ),
        ("eval_accuracy", True, ""),
        ("eval_loss_epoch", False, ""),
        ("eval_score", False, ""),
        ("eval_score", True, ""),
    ],
)
def test_a_direction_that_contradicts_the_name_is_a_warning(kind: str, name: str, greater: bool, words: str, tmp_path):
    watched: dict[str, Any] = {"watch_metric": name, "greater_is_better": greater}
    makers: dict[str, Callable[[], TrainerCallback]] = {
        "stop": lambda: EarlyStoppingCallback(5, **watched),
        "best": lambda: SaveBestModelCallback(tmp_path / "best.pt", **watched),
        "states": lambda: SaveTrainingStateCallback(tmp_path / "states", keep_best=1, **watched),
    }
    callback = makers[kind]()
    trainer = make_trainer(Accuracy, callback)
    message = f"{type(callback).__name__} watches '{name}' with `greater_is_better={greater}`, {words}"
    with pytest.warns(UserWarning, match=message) if words else contextlib.nullcontext() as caught:
        trainer.train(DATA, 2, DATA)
    assert caught is None or len(caught) == 1
