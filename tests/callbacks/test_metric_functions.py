"""Metrics that are functions of all rows: exact over batches and ranks, with clear errors."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torchmetrics
from sklearn.datasets import load_wine
from sklearn.metrics import f1_score
from torch import nn

from pytorch_accelerated.callbacks.evaluation import StepBasedEvaluationCallback
from pytorch_accelerated.callbacks.metrics import MetricsCallback
from pytorch_accelerated.callbacks.weights import ModelEmaCallback
from pytorch_accelerated.errors import (
    ArgumentTypeError,
    ConfigurationError,
    HookOutputError,
)
from pytorch_accelerated.loop.callback import TrainerCallback
from pytorch_accelerated.trainer import Trainer
from tests.chaos.size import some
from tests.support.processes import run_script


def wine() -> tuple[torch.Tensor, torch.Tensor]:
    """178 wines of three kinds, mixed, as a rank gets them: an even and an odd number for training and evaluation."""
    data = load_wine()
    inputs = torch.tensor(data.data, dtype=torch.float32)
    order = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(3))
    inputs = (inputs - inputs.mean(0)) / inputs.std(0)
    return inputs[order], torch.tensor(data.target)[order]


def make_trainer(*callbacks: Any, trainer_class: type[Trainer] = Trainer, outputs: int = 3) -> Trainer:
    torch.manual_seed(1)
    model = nn.Linear(13, outputs)
    return trainer_class(model, nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), lr=0.1), callbacks, seed=2)


def train(trainer: Trainer, **arguments: Any) -> Trainer:
    inputs, targets = wine()
    evaluation = inputs[111:], targets[111:]  # 67 rows
    trainer.train((inputs[:111], targets[:111]), 2, evaluation, per_device_batch_size=8, **arguments)
    return trainer


def latest(trainer: Trainer, name: str) -> float:
    value: float = trainer.run_history.get_latest_metric(name)
    return value


def accuracy(predictions: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (predictions == targets).float().mean()


def macro_f1(predictions: torch.Tensor, targets: torch.Tensor) -> float:
    return float(f1_score(targets, predictions, average="macro"))


class Remembering:
    """A function that keeps what it is called with."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, Any]] = []

    def __call__(self, predictions: Any, targets: Any) -> int:
        self.calls.append((predictions, targets))
        return len(targets)


def check_functions_see_each_row_once_in_order() -> None:
    """Also where ranks have different numbers of rows, or none."""
    inputs, targets = wine()
    for size in some((1, 67), (1, 2, 3, 67)):
        for batch_size in some((4,), (1, 4)):
            seen = Remembering()
            trainer = make_trainer(MetricsCallback({"rows": seen, "f1": macro_f1}, predictions="argmax"))
            metrics = trainer.evaluate((inputs[:size], targets[:size]), per_device_batch_size=batch_size)
            expected = trainer.model(inputs[:size]).argmax(-1)
            assert metrics["eval_rows"] == size
            assert metrics["eval_f1"] == pytest.approx(macro_f1(expected, targets[:size]))
            if trainer.run_config.is_world_process_zero:
                ((predictions, seen_targets),) = seen.calls
                assert torch.equal(predictions, expected)
                assert torch.equal(seen_targets, targets[:size])


def check_functions_beside_torchmetrics_and_ema() -> None:
    metrics = {
        "accuracy": accuracy,
        "exact": torchmetrics.Accuracy(task="multiclass", num_classes=3, average="micro"),
    }
    ema = ModelEmaCallback(
        0.5, save_path=Path("ema.pt"), callbacks=[MetricsCallback({"accuracy": accuracy}, predictions="argmax")]
    )
    trainer = train(make_trainer(ema, MetricsCallback(metrics, predictions="argmax"), StepBasedEvaluationCallback(3)))
    values = trainer.run_history.get_metric_values
    assert values("eval_accuracy") == pytest.approx(values("eval_exact"))
    assert values("intermediate_eval_accuracy") == pytest.approx(values("intermediate_eval_exact"))
    assert len(values("intermediate_eval_accuracy")) >= 2
    assert len(values("train_exact")) == 2
    assert not values("train_accuracy"), "functions would keep all rows of an epoch"
    inputs, targets = wine()
    with torch.no_grad():
        expected = accuracy(ema.ema_model.module(inputs[111:]).argmax(-1), targets[111:])  # type: ignore[union-attr]
    assert latest(trainer, "ema_model_eval_accuracy") == pytest.approx(float(expected))


def check_the_error_of_a_function_reaches_every_rank() -> None:
    def divided(predictions: Any, targets: Any) -> float:
        raise ZeroDivisionError("division by zero")

    trainer = make_trainer(MetricsCallback({"worst": divided}))
    told = r"'worst' failed with ZeroDivisionError.*float32 \[178, 3\].*int64 \[178\].*, in this order"
    with pytest.raises(HookOutputError, match=told) as caught:
        trainer.evaluate(wine())
    if trainer.run_config.is_world_process_zero:
        assert isinstance(caught.value.__cause__, ZeroDivisionError)


def check_results_that_differ_in_size_stay_a_list_in_order() -> None:
    inputs, targets = wine()
    seen = Remembering()

    def positive(outputs: torch.Tensor) -> list[dict[str, torch.Tensor]]:
        return [{"positive": row[row > 0]} for row in outputs]

    trainer = make_trainer(MetricsCallback({"rows": seen}, predictions=positive))
    assert trainer.evaluate((inputs, targets), per_device_batch_size=5)["eval_rows"] == 178
    if trainer.run_config.is_world_process_zero:
        ((predictions, seen_targets),) = seen.calls
        expected = [row[row > 0] for row in trainer.model(inputs)]
        assert [len(each["positive"]) for each in predictions] == [len(row) for row in expected]
        assert torch.allclose(torch.cat([each["positive"] for each in predictions]), torch.cat(expected))
        assert torch.equal(torch.stack(seen_targets), targets)


# Which test_metrics.py does on several ranks, too.
CHECKS = [
    check_functions_see_each_row_once_in_order,
    check_functions_beside_torchmetrics_and_ema,
    check_the_error_of_a_function_reaches_every_rank,
    check_results_that_differ_in_size_stay_a_list_in_order,
]


@pytest.mark.parametrize("check", CHECKS)
def test_functions_on_one_rank(check):
    check()


class DictBatches(Trainer):
    """Batches and outputs with entries of names of their own."""

    def calculate_eval_batch_loss(self, batch: Any) -> dict[str, Any]:
        scores = self.model(batch["measured"])
        loss = nn.functional.cross_entropy(scores, batch["kind"])
        return {"loss": loss, "model_outputs": {"scores": scores, "best": scores.argmax(-1)}, "batch_size": len(scores)}


@pytest.mark.parametrize("predictions", ["best", lambda outputs: outputs["scores"].argmax(-1)], ids=["name", "call"])
def test_predictions_and_targets_are_found_by_name_or_function(predictions):
    inputs, targets = wine()
    callback = MetricsCallback({"accuracy": accuracy}, predictions=predictions, targets="kind")
    trainer = make_trainer(callback, trainer_class=DictBatches)
    metrics = trainer.evaluate({"measured": inputs, "kind": targets})
    with torch.no_grad():
        expected = accuracy(trainer.model(inputs).argmax(-1), targets)
    assert metrics["eval_accuracy"] == pytest.approx(float(expected))


def test_a_loop_of_the_users_own_computes_functions_too():
    class OwnLoop(Trainer):
        def _run_eval_epoch(self, valid_dl: Any, is_training: bool = True, is_intermediate: bool = False) -> None:
            self.model.eval()
            self.callback_handler.call_event("on_eval_epoch_start", self)
            with torch.no_grad():
                for batch in valid_dl:
                    output = self.calculate_eval_batch_loss(batch)
                    self.callback_handler.call_event("on_eval_step_end", self, batch=batch, batch_output=output)
            self.callback_handler.call_event("on_eval_epoch_end", self)

    seen = Remembering()
    train(make_trainer(MetricsCallback({"rows": seen}), trainer_class=OwnLoop))
    assert len(seen.calls) == 2
    assert torch.equal(seen.calls[-1][1], wine()[1][111:])


def test_an_evaluation_that_failed_leaves_no_rows_to_the_next_one():
    class FailsOnce(TrainerCallback):
        failed = False

        def on_eval_step_end(self, trainer: Trainer, batch: Any, batch_output: dict[str, Any], **kwargs: Any) -> None:
            if not self.failed:
                self.failed = True
                raise ValueError("this batch")

    seen = Remembering()
    trainer = make_trainer(MetricsCallback({"rows": seen}), FailsOnce())
    with pytest.raises(ValueError, match="this batch"):
        trainer.evaluate(wine())
    assert trainer.evaluate(wine())["eval_rows"] == 178


def returning(value: Any) -> Any:
    return lambda predictions, targets: value


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (torch.zeros(3), r"returned tensor\(\[0\., 0\., 0\.\]\)"),
        (torch.zeros(3).numpy(), r"returned array\(\[0\., 0\., 0\.\]"),
        ("0.9", "returned '0.9'"),
        (None, "returned None"),
        ({"a": [1, 2]}, r"returned \[1, 2\] in the entry 'a' of its dict"),
    ],
)
def test_a_result_that_is_no_number_is_an_error_that_shows_it(value, told):
    with pytest.raises(HookOutputError, match=f"metric 'worst' {told}"):
        train(make_trainer(MetricsCallback({"worst": returning(value)})))


@pytest.mark.parametrize(
    ("metrics", "error", "told"),
    [
        (accuracy, ArgumentTypeError, r"'accuracy' is not a metric.*MetricsCallback\(\{'accuracy': function\}\)"),
        ([accuracy], ArgumentTypeError, "'accuracy' is not a metric with a name .* Pass a function under a name"),
        ({"loss": accuracy}, ConfigurationError, "cannot be called 'loss'"),
        ({"accuracy": torchmetrics.Accuracy}, ArgumentTypeError, r"Pass an instance, Accuracy\(...\)"),
        ({"accuracy": 0.5}, ArgumentTypeError, "neither a function nor a metric"),
    ],
)
def test_what_is_no_metric_is_an_error_before_the_run(metrics, error, told):
    with pytest.raises(error, match=told):
        MetricsCallback(metrics)


@pytest.mark.parametrize("is_column", [False, True], ids=["row", "column"])
def test_one_logit_per_sample_is_compared_with_its_own_target_or_there_is_an_error_at_the_first_batch(is_column):
    inputs, targets = torch.randn(9, 3), torch.tensor([0.0, 1.0] * 4 + [1.0])
    model = nn.Linear(3, 1)

    def loss_func(outputs, targets):
        return nn.functional.binary_cross_entropy_with_logits(outputs[:, 0], targets)

    def predicted(outputs):
        return outputs > 0 if is_column else outputs[:, 0] > 0

    right = float(((model(inputs)[:, 0] > 0) == targets).float().mean())
    metrics = MetricsCallback({"accuracy": accuracy}, predictions=predicted)
    trainer = Trainer(model, loss_func, None, callbacks=[metrics])
    if is_column:
        with pytest.raises(HookOutputError, match=r"predictions of shape \(3, 1\) and targets of shape \(3,\)"):
            trainer.evaluate((inputs, targets), 3)
    else:
        assert trainer.evaluate((inputs, targets))["eval_accuracy"] == pytest.approx(right)
    with pytest.raises(HookOutputError, match=r"float32 \[8, 1\] on cpu\. .*outputs\[:, 0\] > 0"):
        Trainer(model, loss_func, None, callbacks=[MetricsCallback({"a": accuracy}, predictions="argmax")]).evaluate(
            (inputs, targets)
        )


WITHOUT_TORCHMETRICS = """
import sys
sys.modules["torchmetrics"] = None  # an import of it fails
import torch
from torch import nn
from pytorch_accelerated import Trainer
from pytorch_accelerated.callbacks import MetricsCallback
from pytorch_accelerated.errors import MissingDependencyError

model = nn.Linear(2, 2)
metrics = MetricsCallback({"rows": lambda predictions, targets: len(targets)})
trainer = Trainer(model, nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), lr=0.1), [metrics])
data = torch.randn(9, 2), torch.arange(9) % 2
trainer.train(data, 1, data)
assert trainer.run_history.get_latest_metric("eval_rows") == 9
named = Trainer(model, nn.CrossEntropyLoss(), None, [MetricsCallback(["accuracy"])])
right = (model(data[0]).argmax(1) == data[1]).float().mean().item()
assert abs(named.evaluate(data)["eval_accuracy"] - right) < 1e-6
try:
    MetricsCallback(["auc"])
except MissingDependencyError as error:
    print(error)

try:
    import resource
except ImportError:  # Windows
    print(0)
else:
    wide, many = nn.Linear(2, 256), (torch.randn(160_000, 2), torch.arange(160_000) % 2)
    trainer = Trainer(wide, nn.CrossEntropyLoss(), None, [metrics])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    trainer.evaluate(many, per_device_batch_size=1000)
    print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 160_000)  # KiB a row, which is one of outputs
"""


def test_functions_need_no_torchmetrics_and_hold_their_rows_about_once():
    *_, missing, held = run_script(WITHOUT_TORCHMETRICS).stdout.splitlines()
    assert "pip install torchmetrics" in missing
    assert float(held) < 2.2
