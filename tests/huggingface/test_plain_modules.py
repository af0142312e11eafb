"""Modules that know nothing of labels or losses: what the trainer computes the loss with takes the labels."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from tests.huggingface.runs import Rows, losses, make_trainer
from tests.support.reference import assert_same_numbers


class Plain(nn.Module):
    """Takes an input and returns the logits of two classes, alone, in a tuple or by name."""

    def __init__(self, shape: str = "tensor") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(2, 2)
        self.shape = shape

    def forward(self, x: torch.Tensor) -> Any:
        logits = self.linear(x)
        return {"tensor": logits, "tuple": (logits,), "dict": {"logits": logits}}[self.shape]


class WithLabels(Plain):
    """The same that computes its loss itself."""

    def __init__(self, label_smoothing: float) -> None:
        super().__init__()
        self.label_smoothing = label_smoothing

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> Any:  # type: ignore[override]
        logits = self.linear(x)
        return cross_entropy(logits, labels, label_smoothing=self.label_smoothing), logits


def classes(column: str = "labels", size: int = 10) -> list[dict[str, Any]]:
    """Rows of two classes, with a column that is in nobody's way."""
    return [{"x": row, column: int(row.sum() > 0), "unused": 1.0} for row in Rows(size).x]


def mean_loss(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    logits = outputs["logits"] if isinstance(outputs, dict) else outputs[0] if isinstance(outputs, tuple) else outputs
    total: torch.Tensor = cross_entropy(logits, labels, reduction="sum")
    return total / (len(labels) if num_items_in_batch is None else num_items_in_batch)


def run_of(folder: Path, model: nn.Module, column: str = "labels", **more: Any) -> dict[str, Any]:
    """The losses, evaluation and predictions of a run."""
    data = {"train_dataset": classes(column), "eval_dataset": classes(column)}
    parts = {"model": model, **data, **more.pop("parts", {})}
    trainer = make_trainer(folder, parts=parts, **more)
    trainer.train()
    predicted = trainer.predict(classes(column))
    assert predicted.metrics is not None
    return {
        "losses": losses(trainer),
        "eval_loss": trainer.evaluate()["eval_loss"],
        "test_loss": predicted.metrics["test_loss"],
        "logits": predicted.predictions,
        "labels": predicted.label_ids,
    }


def assert_alike(run: dict[str, Any], other: dict[str, Any]) -> None:
    for name, value in run.items():
        assert_same_numbers(value, other[name], tolerance=1e-5)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize(("shape", "column"), [("tensor", "labels"), ("tuple", "label"), ("dict", "label_ids")])
def test_a_loss_function_or_smoothing_makes_labels_of_a_module_that_names_none(
    shape: str, column: str, smoothing: float, tmp_path: Path
) -> None:
    parts = {} if smoothing else {"compute_loss_func": mean_loss}
    run = run_of(tmp_path, Plain(shape), column, parts=parts, label_smoothing_factor=smoothing)
    assert_alike(run, run_of(tmp_path, WithLabels(smoothing)))


def test_label_names_that_are_given_stay(tmp_path: Path) -> None:
    parts = {"model": Plain(), "compute_loss_func": mean_loss}
    assert make_trainer(tmp_path, parts=parts).label_names == ["labels"]
    assert make_trainer(tmp_path, parts=parts, label_names=[]).label_names == []
    assert make_trainer(tmp_path, parts={"model": Plain()}).label_names == []
