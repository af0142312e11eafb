"""The scale of the loss, declared as to transformers' Trainer, and the same there."""

# mypy: disable-error-code="misc, no-any-return"
# For each class is made twice, of another base.

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pytorch_accelerated.errors import DataError
from pytorch_accelerated.huggingface import Trainer
from tests.chaos.size import some
from tests.huggingface.runs import AnyKeyword, Regression, Rows, Tokens, losses, make_trainer
from tests.huggingface.test_against_transformers import ROUNDING, assert_same_history, run
from tests.support.reference import assert_same_parameters

transformers = pytest.importorskip("transformers")


class NamesTheNumber(Regression):
    """Takes the number by name, and divides by it."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None, num_items_in_batch: Any = None) -> Any:
        outputs = self.linear(x)
        errors = (outputs - labels) ** 2
        return errors.sum() / (errors.numel() if num_items_in_batch is None else num_items_in_batch), outputs


class ReturnsDict(AnyKeyword):
    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None, **kwargs: Any) -> Any:
        loss, outputs = super().forward(x, labels)
        return {"loss": loss, "logits": outputs}


class SaysNo(AnyKeyword):
    accepts_loss_kwargs = False


def own_loss(divide: Callable[..., Any], **declared: Any) -> Callable[[Any], Any]:
    """Makes a trainer whose `compute_loss` is what `divide` returns for trainer, mean, number of rows, and number."""

    def make(base: Any) -> Any:
        class OwnLoss(base):
            def compute_loss(
                self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
            ) -> Any:
                outputs = model(x=inputs["x"])[0]
                mean = nn.functional.mse_loss(outputs, inputs["labels"])
                loss = divide(self, mean, len(outputs), num_items_in_batch)
                return (loss, (loss, outputs)) if return_outputs else loss

        return type("OwnLoss", (OwnLoss,), declared)

    return make


def with_penalty(base: Any) -> Any:
    class WithPenalty(base):
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
            loss, outputs = super().compute_loss(model, inputs, return_outputs=True, **kwargs)
            loss = loss + 0.1 * self.model.linear.weight.square().sum() / self.args.gradient_accumulation_steps
            return (loss, outputs) if return_outputs else loss

    return WithPenalty


def with_loss_in_outputs(base: Any) -> Any:
    class WithLossInOutputs(base):
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
            _, outputs = super().compute_loss(model, inputs, return_outputs=True, **kwargs)
            return (outputs["loss"], outputs) if return_outputs else outputs["loss"]

    return WithLossInOutputs


def copied_step(base: Any) -> Any:
    class CopiedStep(base):
        """A step that reads what is declared, as those of `transformers` have done."""

        def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
            model.train()
            loss = self.compute_loss(model, self._prepare_inputs(inputs), num_items_in_batch=num_items_in_batch)
            if (not self.model_accepts_loss_kwargs or num_items_in_batch is None) and self.compute_loss_func is None:
                loss = loss / self.current_gradient_accumulation_steps
            self.accelerator.backward(loss)
            return loss.detach()

    return CopiedStep


def dividing_step(base: Any) -> Any:
    class DividingStep(base):
        """A step that divides whatever it gets, as many public ones do."""

        def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
            model.train()
            loss = self.compute_loss(model, self._prepare_inputs(inputs), num_items_in_batch=num_items_in_batch)
            loss = loss / self.args.gradient_accumulation_steps
            self.accelerator.backward(loss)
            return loss.detach()

    return DividingStep


def divided(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    return nn.functional.mse_loss(outputs[0], labels, reduction="sum") / num_items_in_batch


def mean(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    return nn.functional.mse_loss(outputs[0], labels)


def as_it_is(trainer: Any, mean: Any, rows: int, number: Any) -> Any:
    return mean if number is None else 1.0 * mean


def by_steps(trainer: Any, mean: Any, rows: int, number: Any) -> Any:
    return mean / trainer.args.gradient_accumulation_steps


def by_current_steps(trainer: Any, mean: Any, rows: int, number: Any) -> Any:
    return mean / trainer.current_gradient_accumulation_steps


def by_number(trainer: Any, mean: Any, rows: int, number: Any) -> Any:
    return mean if number is None else mean * rows / number


def plain(base: Any) -> Any:
    return base


# The model, the subclass, and the loss function, if any.
SAME: dict[str, tuple[Any, ...]] = {
    "a mean": (Regression, plain),
    "a model that divides": (Tokens, plain),
    "a model that names the number": (NamesTheNumber, plain),
    "a model that says that it takes none": (SaysNo, plain),
    "a loss function that divides": (Regression, plain, divided),
    "a loss function that does not": (Regression, plain, mean),
    "an own mean": (Regression, own_loss(as_it_is)),
    "an own mean, taken for divided": (AnyKeyword, own_loss(as_it_is)),
    "an own loss that divides": (AnyKeyword, own_loss(by_number)),
    "an own loss that would divide": (Regression, own_loss(by_number)),
    "divided by the steps": (AnyKeyword, own_loss(by_steps)),
    "divided by the steps, and again": (Regression, own_loss(by_steps)),
    "divided by the steps of the update": (AnyKeyword, own_loss(by_current_steps)),
    "declared as scaled": (Regression, own_loss(by_steps, loss_is_scaled_for_ga=True)),
    "declared as not scaled": (AnyKeyword, own_loss(as_it_is, loss_is_scaled_for_ga=False)),
    "a loss function declared as not scaled": (Regression, own_loss(as_it_is, loss_is_scaled_for_ga=False), mean),
    "added to that of the super class": (Tokens, with_penalty),
    "a copied step": (Tokens, copied_step),
    "a copied step, of a mean": (Regression, copied_step),
    "a copied step, of a model that ignores the number": (AnyKeyword, copied_step),
    "a step that divides": (Regression, dividing_step),
    "a step that divides, of a model that ignores the number": (AnyKeyword, dividing_step),
    "a step that divides, of a model that does, too": (Tokens, dividing_step),
    "a step that divides, of a loss function that does, too": (Regression, dividing_step, divided),
}


def trained(library: str, case: tuple[Any, ...], folder: Path, **arguments: Any) -> Any:
    model, subclass, *functions = case
    parts = {"model": model(), "train_dataset": Rows(8), "compute_loss_func": next(iter(functions), None)}
    base = transformers.Trainer if library == "theirs" else Trainer
    return run(library, folder, parts=parts, kind=subclass(base), eval_strategy="epoch", optim="sgd", **arguments)


@pytest.mark.parametrize("steps", some((2,), (1, 2, 4)))
@pytest.mark.parametrize("name", SAME)
def test_the_loss_has_the_scale_that_it_has_in_transformers(name: str, steps: int, tmp_path: Path) -> None:
    arguments = {"per_device_train_batch_size": 4 // steps, "gradient_accumulation_steps": steps, "max_grad_norm": 0.0}
    ours, theirs = (trained(library, SAME[name], tmp_path / library, **arguments) for library in ("ours", "theirs"))
    assert_same_history(ours.state.log_history, theirs.state.log_history, tolerance=10 * ROUNDING)
    assert_same_parameters(ours.model, theirs.model, tolerance=1e-5)


# Our own loss is the batch's share of the update in any case; theirs is multiplied.
EXACT: dict[str, tuple[Any, ...]] = {
    "a mean of a model that takes any keyword": (AnyKeyword, plain),
    "that with a penalty": (AnyKeyword, with_penalty),
    "that in the outputs": (ReturnsDict, with_loss_in_outputs),
}


@pytest.mark.parametrize("name", [*EXACT, "a model that divides"])
def test_accumulated_batches_equal_a_large_one(name: str, tmp_path: Path) -> None:
    case = {**EXACT, **SAME}[name]
    whole = trained("ours", case, tmp_path / "whole", per_device_train_batch_size=4)
    parts = trained("ours", case, tmp_path / "parts", per_device_train_batch_size=1, gradient_accumulation_steps=4)
    assert losses(parts) == pytest.approx(losses(whole), rel=1e-6)
    assert_same_parameters(parts.model, whole.model, tolerance=1e-6)
    if name in EXACT:
        steps = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4}
        theirs = trained("theirs", case, tmp_path / "theirs", **steps)
        assert losses(theirs)[0] == pytest.approx(4 * losses(whole)[0], rel=0.1)


class MeanOverLabels(AnyKeyword):
    """Takes the mean over those labels of the batch that count: NaN without any."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None, **kwargs: Any) -> Any:
        outputs = self.linear(x)
        if labels is None:
            return (outputs,)
        counts = labels != -100
        return (((outputs - labels) ** 2) * counts).sum() / counts.sum(), outputs


def test_a_batch_without_labels_adds_nothing_to_its_update(tmp_path: Path) -> None:
    def trained_on(*without: int, **arguments: Any) -> Any:
        rows = Rows(12)
        rows.labels[list(without)] = -100
        parts = {"model": MeanOverLabels(), "train_dataset": rows}
        trainer = make_trainer(tmp_path, parts=parts, optim="sgd", num_train_epochs=1, **arguments)
        trainer.train()
        return trainer

    pieces: Any = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 3}
    whole, parts = trained_on(2, 3, per_device_train_batch_size=6), trained_on(2, 3, **pieces)
    assert losses(parts) == pytest.approx(losses(whole), rel=1e-6)
    assert_same_parameters(parts.model, whole.model, tolerance=1e-6)
    with pytest.raises(DataError, match="An update has no items at all"):
        trained_on(*range(6, 12), **pieces)


class CountsItems(Trainer):
    """Says that an item is what it is by default, so that evaluations go by it, too."""

    def count_items(self, batch: Any) -> Any:
        return super().count_items(batch)


@pytest.mark.parametrize("batch_size", [1, 7, 24])
def test_the_loss_of_an_evaluation_may_be_the_mean_over_labels(batch_size: int, tmp_path: Path) -> None:
    rows = Rows(23)
    rows.labels[::3] = -100
    model = MeanOverLabels()
    trainer = make_trainer(tmp_path, kind=CountsItems, parts={"model": model}, per_device_eval_batch_size=batch_size)
    with torch.no_grad():
        errors = (model.linear(rows.x).double() - rows.labels.double()).square()
    assert trainer.evaluate(rows)["eval_loss"] == pytest.approx(errors[rows.labels != -100].mean().item(), rel=1e-6)
