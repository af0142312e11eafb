"""Modules that know nothing of labels or losses: what the trainer computes the loss with takes the labels."""

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from torch import nn
from torch.nn.functional import cross_entropy

from pytorch_accelerated.errors import DataError
from pytorch_accelerated.huggingface import Trainer
from tests.huggingface.runs import Rows, losses, make_trainer
from tests.support.reference import SINGLE, assert_same_numbers

COLUMNS = ["labels", "label", "label_ids"]


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


@pytest.mark.fact("Training: With compute_loss_func, a plain module can be trained, evaluated and used for prediction")
@pytest.mark.parametrize("column", COLUMNS)
@pytest.mark.parametrize("shape", ["tensor", "tuple", "dict"])
def test_a_loss_function_makes_labels_of_a_module_that_names_none(shape: str, column: str, tmp_path: Path) -> None:
    run = run_of(tmp_path, Plain(shape), column, parts={"compute_loss_func": mean_loss})
    assert_alike(run, run_of(tmp_path, WithLabels(0.0)))


@pytest.mark.fact("Training: Label smoothing works with the labels of a plain module")
@pytest.mark.parametrize("shape", ["tensor", "tuple", "dict"])
def test_smoothed_labels_need_no_module_that_names_them(shape: str, tmp_path: Path) -> None:
    run = run_of(tmp_path, Plain(shape), label_smoothing_factor=0.1)
    assert_alike(run, run_of(tmp_path, WithLabels(0.1)))


def test_label_names_that_are_given_stay(tmp_path: Path) -> None:
    parts = {"model": Plain(), "compute_loss_func": mean_loss}
    assert make_trainer(tmp_path, parts=parts).label_names == ["labels"]
    assert make_trainer(tmp_path, parts=parts, label_names=[]).label_names == []
    assert make_trainer(tmp_path, parts={"model": Plain()}).label_names == []


def test_without_labels_a_plain_module_predicts(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, parts={"model": Plain("tuple"), "compute_loss_func": mean_loss})
    output = trainer.predict([{"x": x} for x in Rows(3).x])
    assert output.label_ids is None
    assert_same_numbers(output.predictions, trainer.model(Rows(3).x)[0].detach(), tolerance=SINGLE)


@pytest.mark.fact("Training: A loss that is not a single number or has no gradient is an error with likely reasons")
@pytest.mark.parametrize("shape", ["tensor", "tuple"])
@pytest.mark.parametrize("names_labels", [False, True])
def test_a_first_output_that_is_not_a_loss_is_rejected(names_labels: bool, shape: str, tmp_path: Path) -> None:
    class Indifferent(Plain):
        def forward(self, x: torch.Tensor, labels: Any = None) -> Any:
            return super().forward(x)

    kind = Indifferent if names_labels else Plain
    trainer = make_trainer(
        tmp_path, parts={"model": kind(shape), "train_dataset": classes(), "eval_dataset": classes()}
    )
    message = r"The loss has the shape \(\d, 2\).*`compute_loss_func`.*`label_names`.*`remove_unused_columns`"
    with pytest.raises(DataError, match=message):
        trainer.train()
    if names_labels:  # else nobody takes anything for a loss
        with pytest.raises(DataError, match=message):
            trainer.evaluate()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda loss: loss.expand(3), r"The loss has the shape \(3,\)"),
        (lambda loss: loss.detach(), "The loss has no gradient"),
        (lambda loss: loss.item(), "The loss is a float"),
        (lambda loss: None, "The loss is a NoneType"),
    ],
    ids=["shape", "gradient", "number", "nothing"],
)
def test_an_own_loss_that_nothing_can_be_learnt_from_is_refused(change: Any, message: str, tmp_path: Path) -> None:
    class Changed(Trainer):
        def compute_loss(
            self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
        ) -> Any:
            return change(super().compute_loss(model, inputs))

    with pytest.raises(DataError, match=f"{message}.*compute_loss"):
        make_trainer(tmp_path, kind=Changed).train()


class LossOfItsOwn(Trainer):
    """Takes what it needs out of the batch, as many subclasses do."""

    needs = "labels"

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        wanted = inputs.pop(self.needs)
        outputs = model(**inputs)
        loss = mean_loss(outputs, wanted)
        return (loss, outputs) if return_outputs else loss


@pytest.mark.parametrize("make", [list, Dataset.from_list], ids=["rows", "datasets"])
@pytest.mark.parametrize("accumulation", [1, 2])  # batches are looked at beforehand where several make an update
def test_a_column_that_was_taken_out_is_named_when_a_loss_looks_for_it(
    make: Any, accumulation: int, tmp_path: Path
) -> None:
    parts = {"model": Plain(), "train_dataset": make(classes())}
    trainer = make_trainer(tmp_path, kind=LossOfItsOwn, parts=parts, gradient_accumulation_steps=accumulation)
    message = r"LossOfItsOwn.compute_loss looks for 'labels', .*the forward of Plain .*label_names=\['labels'\]"
    with pytest.raises(DataError, match=message) as caught:
        trainer.train()
    assert isinstance(caught.value.__cause__, KeyError)
    make_trainer(tmp_path, kind=LossOfItsOwn, parts=parts, label_names=["labels"]).train()
    parts["train_dataset"] = make([{"x": row["x"], "labels": row["labels"]} for row in classes()])
    make_trainer(tmp_path, kind=LossOfItsOwn, parts=parts, remove_unused_columns=False).train()


@pytest.mark.parametrize("settings", [{"label_names": ["labels"]}, {"remove_unused_columns": False}])
def test_a_mistake_in_a_loss_is_left_as_it_is(settings: dict[str, Any], tmp_path: Path) -> None:
    class Mistaken(LossOfItsOwn):
        needs = "lables"

    parts = {"model": Plain(), "train_dataset": classes()}
    with pytest.raises(KeyError, match="lables"):
        make_trainer(tmp_path, kind=Mistaken, parts=parts, **settings).train()
