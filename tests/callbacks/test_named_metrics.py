"""Metrics by name, compared with scikit-learn's."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sklearn.metrics as theirs
import torch
from torch import nn

from pytorch_accelerated import Trainer
from pytorch_accelerated.callbacks import DEFAULT_CALLBACKS, EarlyStoppingCallback, MetricsCallback
from pytorch_accelerated.errors import ConfigurationError, HookOutputError
from tests.support.resuming import SaveAndStop

INPUTS = torch.randn(60, 4, generator=torch.Generator().manual_seed(0))
NOISE = torch.randn(60, 3, generator=torch.Generator().manual_seed(1))


def run(outputs: int, loss: Any, targets: torch.Tensor, names: Any, *callbacks: Any, **arguments: Any) -> Trainer:
    torch.manual_seed(0)
    model = nn.Linear(4, outputs)
    metrics = MetricsCallback(names)
    trainer = Trainer(model, loss, torch.optim.AdamW(model.parameters(), 0.05), [metrics, *callbacks], seed=1)
    settings = {"eval_dataset": (INPUTS, targets), "per_device_batch_size": 7, **arguments}
    trainer.train((INPUTS, targets), 2, **settings)
    return trainer


def recorded(trainer: Trainer, name: str) -> float:
    return float(trainer.run_history.get_latest_metric(name))


CLASSES = (INPUTS[:, :3] + NOISE).argmax(1)
ONE = (INPUTS[:, 0] + NOISE[:, 0] > 0).long()
LABELS = (INPUTS[:, :3] + NOISE > 0).float()
NUMBERS = INPUTS @ torch.tensor([[1.0, 2.0], [0.0, 1.0], [3.0, 0.0], [1.0, 1.0]]) + NOISE[:, :2]
Expected = dict[str, Callable[[np.ndarray, np.ndarray], float]]


def test_of_several_classes() -> None:
    names = ["accuracy", "balanced_accuracy", "precision", "recall", "f1", "auc", "mcc"]
    trainer = run(3, nn.CrossEntropyLoss(), CLASSES, names)
    scores = trainer.predict(INPUTS).softmax(1)
    expected: dict[str, Callable[..., float]] = {
        "accuracy": theirs.accuracy_score,
        "balanced_accuracy": theirs.balanced_accuracy_score,
        "precision": lambda *rows: theirs.precision_score(*rows, average="macro", zero_division=0),
        "recall": lambda *rows: theirs.recall_score(*rows, average="macro"),
        "f1": lambda *rows: theirs.f1_score(*rows, average="macro"),
        "mcc": theirs.matthews_corrcoef,
    }
    for name, function in expected.items():
        assert recorded(trainer, f"eval_{name}") == pytest.approx(function(CLASSES, scores.argmax(1)), rel=1e-5), name
    area = theirs.roc_auc_score(CLASSES, scores, multi_class="ovr")
    assert recorded(trainer, "eval_auc") == pytest.approx(area, rel=1e-5)


def test_one_of_the_five_highest_scores() -> None:
    wanted = torch.arange(60) % 8
    trainer = run(8, nn.CrossEntropyLoss(), wanted, "top_5_accuracy")
    expected = theirs.top_k_accuracy_score(wanted, trainer.predict(INPUTS), k=5)
    assert recorded(trainer, "eval_top_5_accuracy") == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    "form", [lambda targets: targets.float()[:, None], lambda targets: targets], ids=["float", "int"]
)
def test_of_two_classes_from_one_score(form: Callable[[torch.Tensor], torch.Tensor]) -> None:
    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return nn.functional.binary_cross_entropy_with_logits(outputs.squeeze(1), targets.float().reshape(-1))

    trainer = run(1, loss, form(ONE), ["accuracy", "precision", "recall", "f1", "auc", "average_precision"])
    scores = trainer.predict(INPUTS).squeeze(1).numpy()
    expected: Expected = {
        "accuracy": lambda wanted, scores: theirs.accuracy_score(wanted, scores > 0),
        "precision": lambda wanted, scores: theirs.precision_score(wanted, scores > 0),
        "recall": lambda wanted, scores: theirs.recall_score(wanted, scores > 0),
        "f1": lambda wanted, scores: theirs.f1_score(wanted, scores > 0),
        "auc": theirs.roc_auc_score,
        "average_precision": theirs.average_precision_score,
    }
    for name, function in expected.items():
        assert recorded(trainer, f"eval_{name}") == pytest.approx(function(ONE.numpy(), scores), rel=1e-5), name
    assert 0 < recorded(trainer, "train_accuracy") <= 1


def test_of_several_labels() -> None:
    trainer = run(3, nn.BCEWithLogitsLoss(), LABELS, ["f1", "auc"])
    scores, wanted = trainer.predict(INPUTS).numpy(), LABELS.numpy()
    assert recorded(trainer, "eval_f1") == pytest.approx(theirs.f1_score(wanted, scores > 0, average="macro"), rel=1e-5)
    assert recorded(trainer, "eval_auc") == pytest.approx(theirs.roc_auc_score(wanted, scores), rel=1e-5)


@pytest.mark.parametrize("columns", [1, 2])
def test_of_numbers(columns: int) -> None:
    wanted = NUMBERS[:, :columns]
    trainer = run(columns, nn.MSELoss(), wanted, ["mae", "mse", "rmse", "r2"])
    found = trainer.predict(INPUTS).numpy()
    assert recorded(trainer, "eval_mae") == pytest.approx(theirs.mean_absolute_error(wanted, found), rel=1e-5)
    assert recorded(trainer, "eval_mse") == pytest.approx(theirs.mean_squared_error(wanted, found), rel=1e-5)
    assert recorded(trainer, "eval_rmse") == pytest.approx(theirs.mean_squared_error(wanted, found) ** 0.5, rel=1e-5)
    assert recorded(trainer, "eval_r2") == pytest.approx(theirs.r2_score(wanted, found), rel=1e-4)


def test_the_task_is_said_and_the_first_set_has_the_plain_names(capsys: pytest.CaptureFixture[str]) -> None:
    sets = {"near": (INPUTS, CLASSES), "far": (-INPUTS, CLASSES)}
    trainer = run(3, nn.CrossEntropyLoss(), CLASSES, "accuracy", eval_dataset=sets)
    assert capsys.readouterr().out.count("Metrics for 3 classes: accuracy") == 1
    history = trainer.run_history
    assert history.get_metric_values("eval_accuracy") == history.get_metric_values("eval_near_accuracy")
    assert history.get_metric_values("eval_accuracy") != history.get_metric_values("eval_far_accuracy")


def test_functions_of_scikit_learn_get_the_targets_first() -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    metrics = MetricsCallback(
        {"kappa": theirs.cohen_kappa_score, "zero_one": theirs.zero_one_loss}, predictions="argmax"
    )
    swapped = MetricsCallback({"r2": theirs.r2_score}, predictions=lambda outputs: outputs[:, 0])
    trainer = Trainer(model, nn.CrossEntropyLoss(), torch.optim.AdamW(model.parameters()), [metrics, swapped])
    values = trainer.evaluate((INPUTS, CLASSES))
    outputs = trainer.predict(INPUTS)
    assert values["eval_kappa"] == pytest.approx(theirs.cohen_kappa_score(CLASSES, outputs.argmax(1)), rel=1e-6)
    assert values["eval_r2"] == pytest.approx(theirs.r2_score(CLASSES, outputs[:, 0]), rel=1e-6)


def test_an_epoch_of_training_that_is_resumed_has_the_same_metrics(tmp_path: Path) -> None:
    arguments = (3, nn.CrossEntropyLoss(), CLASSES, ["accuracy", "auc"])
    whole = run(*arguments)
    run(*arguments, SaveAndStop(tmp_path / "state", 12))
    resumed = run(*arguments, resume_from=tmp_path / "state")
    for name in ("train_accuracy", "train_auc", "eval_auc"):
        assert resumed.run_history.get_metric_values(name) == whole.run_history.get_metric_values(name)


def test_unknown_names_and_outputs_that_fit_no_task_are_errors() -> None:
    for names in (["acuracy"], ["accuracy", "mae"]):
        with pytest.raises(ConfigurationError, match="not known, or belong to different tasks"):
            MetricsCallback(names)
    with pytest.raises(
        HookOutputError, match=r"do not fit the predictions, float32 \[\d+, 3\].*, and the targets, float32 \[\d+, 2\]"
    ):
        run(3, lambda outputs, targets: outputs.sum(), NOISE[:, :2], ["mae"])


def test_names_and_functions_may_be_in_callbacks_of_their_own() -> None:
    def right(predictions: torch.Tensor, targets: torch.Tensor) -> float:
        return float((predictions.argmax(1) == targets).float().mean())

    def wrong(predictions: torch.Tensor, targets: torch.Tensor) -> float:
        return 1 - right(predictions, targets)

    callbacks = [MetricsCallback({"right": right}), MetricsCallback({"wrong": wrong})]
    model = nn.Linear(4, 3)
    trainer = Trainer(model, nn.CrossEntropyLoss(), None, callbacks, metrics=["accuracy"])
    found = trainer.evaluate((INPUTS, CLASSES))
    assert found["eval_right"] == pytest.approx(found["eval_accuracy"]) == 1 - found["eval_wrong"]


def test_an_ellipsis_stands_for_the_default_callbacks_and_metrics_come_first() -> None:
    stopping = EarlyStoppingCallback(3)
    trainer = Trainer(nn.Linear(4, 3), nn.CrossEntropyLoss(), None, [stopping, ...], metrics=["accuracy"])
    names = ["MetricsCallback", "EarlyStoppingCallback", *(kind.__name__ for kind in DEFAULT_CALLBACKS)]
    assert trainer.callback_handler.callback_list == names
    assert trainer.callback_handler.callbacks[1] is stopping
