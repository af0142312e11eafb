"""Metrics by name, compared with scikit-learn's."""

import functools
from pathlib import Path
from typing import Any

import pytest
import sklearn.metrics as theirs
import torch
from torch import nn
from torch.nn import functional as F

from pytorch_accelerated import Trainer
from pytorch_accelerated.callbacks import (
    DEFAULT_CALLBACKS,
    EarlyStoppingCallback,
    MetricsCallback,
    ModelEmaCallback,
    SaveTrainingStateCallback,
    StopTrainingError,
    TrainerCallback,
)
from pytorch_accelerated.errors import ArgumentTypeError, ConfigurationError, HookOutputError
from tests.support.named import SIZE, Same, check
from tests.support.processes import run_on_ranks
from tests.support.resuming import SaveAndStop

INPUTS = torch.randn(60, 4, generator=torch.Generator().manual_seed(0))
NOISE = torch.randn(60, 3, generator=torch.Generator().manual_seed(1))


def run(outputs: int, loss: Any, targets: torch.Tensor, names: Any, *callbacks: Any, **arguments: Any) -> Trainer:
    torch.manual_seed(0)
    model = nn.Linear(4, outputs)
    metrics = MetricsCallback(names)
    trainer = Trainer(model, loss, torch.optim.AdamW(model.parameters(), 0.05), [metrics, *callbacks], seed=1)
    settings = {"eval_dataset": (INPUTS, targets), "per_device_batch_size": 7, **arguments}
    trainer.train(settings.pop("train", (INPUTS, targets)), 2, **settings)
    return trainer


def recorded(trainer: Trainer, name: str) -> float:
    return float(trainer.run_history.get_latest_metric(name))


CLASSES = (INPUTS[:, :3] + NOISE).argmax(1)
LABELS = (INPUTS[:, :3] + NOISE > 0).float()


def test_each_name_of_each_shape_has_the_value_of_scikit_learn() -> None:
    assert check((1, 7, SIZE)) > 900


@pytest.mark.processes
def test_the_same_on_two_ranks() -> None:
    run_on_ranks(Path(__file__).parents[1] / "ranks" / "named.py", 2)


def own(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return outputs.float().mean()


ROWS = 12
SCORES, TOKENS = torch.randn(ROWS, 4), torch.randn(ROWS, 5, 5)
ONE_HOT, NUMBERS = torch.eye(4)[torch.arange(ROWS) % 4], torch.randint(0, 4, (ROWS,))
BOTH = r"4 labels .*`task='labels'`\) or 4 classes .*`task='multiclass'`\)"
PLACES = torch.randint(0, 5, (ROWS, 5))
TWO_READINGS: dict[str, tuple[Any, ...]] = {
    "one-hot or labels": (own, SCORES, ONE_HOT, "f1", BOTH),
    "both dimensions": (own, TOKENS, PLACES, "f1", r"`classes_dim=1`\) or .*`classes_dim=2`\)"),
    "places or labels": (nn.BCEWithLogitsLoss(), TOKENS, (TOKENS > 0).float(), "f1", "task='binary'.* or 5 labels"),
    "logits or probabilities": (own, SCORES[:, 0].sigmoid(), NUMBERS > 1, "f1", "scores='logits'` or `scores='prob"),
    "numbers or classes": (own, SCORES[:, 0], SCORES[:, 1], "f1", "Targets other than 0 and 1 are not classes.* mae"),
    "a regression": (nn.MSELoss(), SCORES[:, 0], SCORES[:, 1], "accuracy", "The task is numbers, .* no accuracy"),
    "class numbers": (own, NUMBERS, NUMBERS, "f1", "from class numbers, which has no f1", torch.Tensor.long),
    "no shape": (own, SCORES, SCORES[:, :3], "mae", r"float32 \[\d+, 4\].*, and the targets float32 \[\d+, 3\]"),
}


@pytest.mark.parametrize("case", TWO_READINGS)
def test_where_two_readings_are_left_an_error_shows_them(case: str) -> None:
    loss, outputs, targets, name, words, *predictions = TWO_READINGS[case]
    metrics = MetricsCallback([name], predictions=next(iter(predictions), None))
    trainer = Trainer(Same(), loss, None, callbacks=[metrics])
    with pytest.raises(HookOutputError, match=words):
        trainer.evaluate((outputs, targets), per_device_batch_size=5)


def test_targets_may_be_shares_in_training_and_class_numbers_in_evaluation() -> None:
    mixed = 0.9 * nn.functional.one_hot(CLASSES, 3).float() + 0.1 / 3
    evaluated = {"eval_dataset": (INPUTS, CLASSES)}
    trainer = run(3, nn.CrossEntropyLoss(), CLASSES, ["accuracy", "f1"], train=(INPUTS, mixed), **evaluated)
    found = trainer.predict(INPUTS).argmax(1)
    assert recorded(trainer, "eval_f1") == pytest.approx(theirs.f1_score(CLASSES, found, average="macro"), rel=1e-6)


def mixed_up(batch: Any) -> Any:
    """What mixup makes of a batch, of an even number of rows."""
    inputs, targets = (each[: len(batch[0]) // 2 * 2] for each in batch)
    shares = nn.functional.one_hot(targets, 3).float()
    return 0.3 * inputs + 0.7 * inputs.flip(0), 0.3 * shares + 0.7 * shares.flip(0)


def test_targets_are_those_that_the_loss_was_computed_with_where_a_hook_has_mixed_the_batch() -> None:
    class Mixing(Trainer):
        def calculate_train_batch_loss(self, batch: Any) -> dict[str, Any]:
            return super().calculate_train_batch_loss(mixed_up(batch))

    class MixingByHand(Trainer):
        def calculate_train_batch_loss(self, batch: Any) -> dict[str, Any]:
            inputs, targets = mixed_up(batch)
            outputs = self.model(inputs)
            loss = nn.functional.cross_entropy(outputs, targets)
            return {"loss": loss, "model_outputs": outputs, "batch_size": len(inputs), "batch": (inputs, targets)}

    for kind in (Mixing, MixingByHand):
        model = nn.Linear(4, 3)
        order: dict[str, Any] = {"train_dataloader_kwargs": {"shuffle": False}, "per_device_batch_size": 7}
        trainer = kind(model, nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), 0.0), metrics=["accuracy"])
        trainer.train((INPUTS, CLASSES), 1, eval_dataset=(INPUTS, CLASSES), **order)
        batches = map(mixed_up, zip(INPUTS.split(7), CLASSES.split(7), strict=True))
        right = torch.cat([model(inputs).argmax(1) == shares.argmax(1) for inputs, shares in batches])
        assert recorded(trainer, "train_accuracy") == pytest.approx(float(right.float().mean()))
        assert recorded(trainer, "eval_accuracy") == theirs.accuracy_score(CLASSES, model(INPUTS).argmax(1))


def test_a_hook_that_leaves_rows_out_without_a_word_is_an_error_that_says_what_to_return() -> None:
    class Shortening(Trainer):
        def calculate_train_batch_loss(self, batch: Any) -> dict[str, Any]:
            outputs = self.model(batch[0][1:])
            loss = nn.functional.cross_entropy(outputs, batch[1][1:])
            return {"loss": loss, "model_outputs": outputs, "batch_size": len(outputs)}

    model = nn.Linear(4, 3)
    trainer = Shortening(model, None, torch.optim.SGD(model.parameters(), 0.1), metrics=["accuracy"])
    with pytest.raises(HookOutputError, match="6 rows of outputs and 7 of targets.*'batch'"):
        trainer.train((INPUTS, CLASSES), 1, per_device_batch_size=7)


def test_the_task_is_said_and_the_first_set_has_the_plain_names(capsys: pytest.CaptureFixture[str]) -> None:
    sets = {"near": (INPUTS, CLASSES), "far": (-INPUTS, CLASSES)}
    trainer = run(3, nn.CrossEntropyLoss(), CLASSES, "accuracy", eval_dataset=sets)
    assert capsys.readouterr().out.count("Metrics for 3 classes: accuracy") == 1
    history = trainer.run_history
    assert history.get_metric_values("eval_accuracy") == history.get_metric_values("eval_near_accuracy")
    assert history.get_metric_values("eval_accuracy") != history.get_metric_values("eval_far_accuracy")


def test_functions_of_scikit_learn_get_the_targets_first_also_within_others() -> None:
    @functools.wraps(theirs.zero_one_loss)
    def wrapped(*rows: Any) -> Any:
        return theirs.zero_one_loss(*rows)

    squared = functools.partial(theirs.fbeta_score, beta=2, average="macro")
    model = nn.Linear(4, 3)
    functions = {"kappa": theirs.cohen_kappa_score, "wrong": wrapped, "fbeta": squared}
    trainer = Trainer(model, nn.CrossEntropyLoss(), None, [MetricsCallback(functions, predictions="argmax")])
    values = trainer.evaluate((INPUTS, CLASSES))
    found = trainer.predict(INPUTS).argmax(1)
    for name, function in functions.items():
        assert values[f"eval_{name}"] == pytest.approx(function(CLASSES, found), rel=1e-6), name
    with pytest.raises(ArgumentTypeError, match=r"scorer of scikit-learn.* sklearn\.metrics\.f1_score"):
        MetricsCallback({"f1": theirs.get_scorer("f1_macro")})


@pytest.mark.parametrize("stop", [4, 9, 12])  # within the first epoch, at its end, and within the second
@pytest.mark.parametrize("loss", [nn.CrossEntropyLoss(), lambda outputs, targets: F.cross_entropy(outputs, targets)])
def test_a_resumed_run_has_the_same_metrics(loss: Any, stop: int, tmp_path: Path) -> None:
    arguments = (3, loss, CLASSES, ["accuracy", "f1"])
    whole = run(*arguments)
    run(*arguments, SaveAndStop(tmp_path / "state", stop))
    resumed = run(*arguments, resume_from=tmp_path / "state")
    for name in ("train_accuracy", "train_f1", "eval_accuracy", "eval_f1"):
        assert resumed.run_history.get_metric_values(name) == whole.run_history.get_metric_values(name), name


def test_an_evaluation_that_was_stopped_begins_again(tmp_path: Path) -> None:
    class StopWithin(TrainerCallback):
        def on_eval_step_end(self, trainer: Trainer, **kwargs: Any) -> None:
            if trainer.run_context.parts.reports.position_in_pass == 14:
                raise StopTrainingError("in the middle")

    arguments = (3, nn.CrossEntropyLoss(), CLASSES, ["accuracy", "f1"])
    whole = run(*arguments)
    run(*arguments, StopWithin(), SaveTrainingStateCallback(tmp_path))
    resumed = run(*arguments, resume_from=tmp_path)
    for name in ("eval_accuracy", "eval_f1"):
        assert resumed.run_history.get_metric_values(name) == whole.run_history.get_metric_values(name)


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (["acc"], "Did you mean 'accuracy'"),
        (["f1_score"], "Did you mean 'f1'"),
        (["Accuracy"], "Did you mean 'accuracy'"),
        (["roc_auc"], "Did you mean 'auc'"),
        (["accuracy", "mae"], "mae are for numbers, and accuracy for classes"),
    ],
)
def test_names_that_there_are_not_and_names_of_different_tasks(names: list[str], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        MetricsCallback(names)


def test_a_metric_of_numbers_for_classes_is_an_error_that_says_what_it_is_of() -> None:
    trainer = Trainer(nn.Linear(4, 3), nn.CrossEntropyLoss(), None, metrics=["mse"])
    with pytest.raises(HookOutputError, match="the metrics are of numbers, which need equal shapes"):
        trainer.evaluate((INPUTS, CLASSES))


def test_names_and_metrics_of_torchmetrics_may_be_in_one_callback() -> None:
    import torchmetrics

    metrics = MetricsCallback(["accuracy", torchmetrics.Accuracy(task="multiclass", num_classes=3)])
    values = Trainer(nn.Linear(4, 3), nn.CrossEntropyLoss(), None, [metrics]).evaluate((INPUTS, CLASSES))
    assert values["eval_accuracy"] == pytest.approx(values["eval_MulticlassAccuracy"])


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


def test_the_metrics_of_a_trainer_are_those_of_an_average_too(tmp_path: Path) -> None:
    model = nn.Linear(4, 3)
    path = tmp_path / "average.pt"
    average = ModelEmaCallback(0.5, save_path=path, watch_metric="ema_model_eval_f1", greater_is_better=True)
    trainer = Trainer(model, nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), 0.5), [average], metrics=["f1"])
    trainer.train((INPUTS, CLASSES), 2, (INPUTS, CLASSES))
    found = average.ema_model.module(INPUTS).argmax(1)
    expected = theirs.f1_score(CLASSES, found, average="macro")
    assert recorded(trainer, "ema_model_eval_f1") == pytest.approx(expected, rel=1e-6)
    assert recorded(trainer, "eval_f1") != recorded(trainer, "ema_model_eval_f1")


def test_an_ellipsis_stands_for_the_default_callbacks_and_metrics_come_first() -> None:
    stopping = EarlyStoppingCallback(3)
    trainer = Trainer(nn.Linear(4, 3), nn.CrossEntropyLoss(), None, [stopping, ...], metrics=["accuracy"])
    names = ["MetricsCallback", "EarlyStoppingCallback", *(kind.__name__ for kind in DEFAULT_CALLBACKS)]
    assert trainer.callback_handler.callback_list == names
    assert trainer.callback_handler.callbacks[1] is stopping
