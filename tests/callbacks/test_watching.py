"""Watched names without a value at the end of the first epoch are an error; others are not. Which value is the best."""

import contextlib
import functools
import math
from collections.abc import Callable
from pathlib import Path
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
from pytorch_accelerated.huggingface import Trainer as HuggingFaceTrainer
from pytorch_accelerated.huggingface import TrainingArguments
from pytorch_accelerated.loop.callback import TrainerCallback
from pytorch_accelerated.record.watching import best_record
from pytorch_accelerated.tracking import InMemoryRunHistory, RunHistory, greater_is_better
from pytorch_accelerated.trainer import Trainer
from tests.huggingface.runs import Regression

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


@pytest.mark.parametrize(
    ("name", "mode", "words"),
    [
        ("eval_accuracy", "min", 'The ReduceLROnPlateau watches .*`mode="min"`, .*more is better. Pass `mode="max"`'),
        ("eval_loss_epoch", "max", 'the highest value counts as the best, .*less is better. Pass `mode="min"`'),
        ("eval_accuracy", "max", ""),
        ("eval_score", "min", ""),
    ],
)
def test_a_plateau_of_a_metric_that_rises_is_a_warning(name: str, mode: Any, words: str) -> None:
    plateau = functools.partial(ReduceLROnPlateau, mode=mode)
    with pytest.warns(UserWarning, match=words) if words else contextlib.nullcontext() as caught:
        make_trainer(Accuracy).train(DATA, 2, DATA, create_scheduler_fn=plateau, scheduler_metric=name)
    assert caught is None or len(caught) == 1


def test_the_hugging_face_trainer_warns_of_such_directions_too(tmp_path: Path) -> None:
    rows = [{"x": torch.ones(2), "labels": torch.ones(1)}] * 4
    for schedule, greater, complains in (("plateau", None, True), ("linear", None, False), ("linear", False, True)):
        arguments = TrainingArguments(
            str(tmp_path), report_to="none", save_strategy="no", eval_strategy="epoch", num_train_epochs=1,
            metric_for_best_model="accuracy", greater_is_better=greater,
            lr_scheduler_type={"plateau": "reduce_lr_on_plateau"}.get(schedule, schedule),
        )  # fmt: skip
        trainer = HuggingFaceTrainer(
            Regression(), arguments, train_dataset=rows, eval_dataset=rows, compute_metrics=lambda _: {"accuracy": 1.0}
        )
        with pytest.warns(UserWarning, match="by its name more is") if complains else contextlib.nullcontext():
            trainer.train()


MORE = """accuracy acc top5_accuracy balanced_accuracy f1 macro_f1 f1_macro auc roc_auc auroc average_precision
    precision@5 map mAP map_50 map50 recall miou mIoU iou mean_iou jaccard dice kappa cohen_kappa mcc matthews_corrcoef
    r2 psnr ssim bleu sacrebleu bleu4 rouge rouge1 rougeL rougeLsum meteor chrf ndcg mrr pearson spearmanr
    MulticlassF1Score BinaryAccuracy MulticlassAUROC CohenKappa BLEUScore R2Score word_accuracy"""
LESS = """loss my_loss valLoss dice_loss log_loss error error_rate top_5_error mae mse rmse MeanSquaredError mape msle
    rmsle mean_absolute_error nll cer wer WordErrorRate perplexity ppl fid lpips brier_score ece accuracy_error"""
UNKNOWN = (
    "score neg_log_loss neg_mean_squared_error learning_rate gradient_norm precise remap factor smoothing epoch lr"
)


@pytest.mark.parametrize(("names", "expected"), [(MORE, True), (LESS, False), (UNKNOWN, None)])
def test_one_table_knows_what_is_better(names: str, expected: bool | None) -> None:
    assert {name: greater_is_better(name) for name in names.split()} == dict.fromkeys(names.split(), expected)
