"""Losses that are told the number of items and take a mean all the same: an update is that of one large batch."""

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pytorch_accelerated.errors import ConfigurationError
from pytorch_accelerated.huggingface import Trainer
from pytorch_accelerated.huggingface.engine.divisor import ITEMS, DivisorWatch
from tests.huggingface.runs import AnyKeyword, Regression, Rows, Tokens, losses, make_trainer


class OwnLoss(Trainer):
    """Overrides `compute_loss` as scripts do, with the parameter because it must be there."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        labels = inputs.pop("labels")
        outputs = model(**inputs)[0]
        loss = nn.functional.mse_loss(outputs, labels)
        return (loss, outputs) if return_outputs else loss


class DividesByBatches(OwnLoss):
    """Divides by the number of batches itself, as trainers do that are told not to be scaled."""

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        return super().compute_loss(*args, **kwargs) / self.current_gradient_accumulation_steps  # type: ignore[attr-defined]


def mean_loss(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    return nn.functional.mse_loss(outputs[0], labels)


def sum_loss(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    return nn.functional.mse_loss(outputs[0], labels, reduction="sum") / num_items_in_batch


WAYS: dict[str, dict[str, Any]] = {
    "a model that takes any keyword": {"parts": {"model": AnyKeyword}},
    "an overridden compute_loss": {"parts": {"model": AnyKeyword}, "kind": OwnLoss},
    "one that divides by the batches": {"parts": {"model": AnyKeyword}, "kind": DividesByBatches},
    "a loss function that ignores the number": {"parts": {"model": Regression}, "compute_loss_func": mean_loss},
    "a loss function that divides by the number": {"parts": {"model": Regression}, "compute_loss_func": sum_loss},
    "a model that divides by the number": {"parts": {"model": Tokens}},
}


def run(way: str, folder: Path, make: Any = make_trainer, **arguments: Any) -> Any:
    parts = {"model": WAYS[way]["parts"]["model"](), "train_dataset": Rows(20)}
    if "compute_loss_func" in WAYS[way]:
        parts["compute_loss_func"] = WAYS[way]["compute_loss_func"]
    kind = WAYS[way].get("kind")
    trainer = make(folder, parts=parts, **({"kind": kind} if kind else {}), **arguments)
    trainer.train()
    return trainer


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.fact(
    "Differences: A loss that ignores num_items_in_batch is accumulated exactly; in transformers it is multiplied"
)
def test_accumulated_batches_equal_a_large_one(way: str, tmp_path: Path) -> None:
    whole = run(way, tmp_path / "whole", per_device_train_batch_size=6)
    parts = run(way, tmp_path / "parts", per_device_train_batch_size=2, gradient_accumulation_steps=3)
    assert losses(parts) == pytest.approx(losses(whole), rel=1e-6)
    torch.testing.assert_close(parts.model.state_dict(), whole.model.state_dict(), rtol=1e-6, atol=1e-7)


def test_theirs_multiplies_what_ignores_the_number(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")

    def first_loss(batch_size: int, accumulation: int) -> float:
        arguments = transformers.TrainingArguments(
            str(tmp_path),
            per_device_train_batch_size=batch_size,
            gradient_accumulation_steps=accumulation,
            train_sampling_strategy="sequential",
            max_steps=1,
            logging_steps=1,
            save_strategy="no",
            use_cpu=True,
            report_to=[],
            disable_tqdm=True,
        )
        trainer = transformers.Trainer(AnyKeyword(), arguments, train_dataset=Rows(20))
        trainer.train()
        return float(trainer.state.log_history[0]["loss"])

    assert first_loss(2, 3) == pytest.approx(3 * first_loss(6, 1), rel=1e-5)


WAYS_TO_DIVIDE: dict[str, Any] = {
    "at once": lambda total, number: total / number,
    "in place": lambda total, number: total.clone().div_(number),
    "by a tensor": lambda total, number: total / torch.tensor(number),
    "by a tensor of another dtype": lambda total, number: total / torch.as_tensor([number]).to(torch.float32)[0],
    "by at least 1": lambda total, number: total / max(number, 1),
    "by a multiple": lambda total, number: 2 * total / (number * 2 + 0.0),
    "times the inverse": lambda total, number: total * (1 / number),
    "times the inverse, with a float on the left": lambda total, number: total * (1.0 / number),
    "with a number of digits": lambda total, number: total / number if f"{number}" == "6" else None,
    "by what a tensor holds": lambda total, number: total / torch.full((), number).item(),
    "in a list": lambda total, number: torch.stack([total / number, 0 * total]).sum(),
}


@pytest.mark.parametrize("way", WAYS_TO_DIVIDE)
def test_however_a_loss_is_divided_it_is_noticed(way: str, tmp_path: Path) -> None:
    def loss(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
        return WAYS_TO_DIVIDE[way]((outputs[0] - labels).square().sum(), num_items_in_batch)

    def trained(**arguments: Any) -> Any:
        parts = {"train_dataset": Rows(12), "compute_loss_func": loss}
        trainer = make_trainer(tmp_path, parts=parts, num_train_epochs=1, **arguments)
        trainer.train()
        return trainer

    whole = trained(per_device_train_batch_size=6)
    parts = trained(per_device_train_batch_size=2, gradient_accumulation_steps=3)
    assert losses(parts) == pytest.approx(losses(whole), rel=1e-6)


def test_a_number_that_becomes_a_metric_divides_nothing(tmp_path: Path) -> None:
    def mean_with_metric(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
        errors = (outputs[0] - labels).square()
        seen.append((errors.sum() / num_items_in_batch).item() if num_items_in_batch else None)
        return errors.mean()

    def first_loss(**arguments: Any) -> float:
        trainer = make_trainer(tmp_path, parts={"compute_loss_func": mean_with_metric}, max_steps=1, **arguments)
        trainer.train()
        return losses(trainer)[0]

    seen: list[Any] = []
    assert first_loss(gradient_accumulation_steps=3) == pytest.approx(first_loss(per_device_train_batch_size=6))
    assert seen[0] > 0


@pytest.mark.fact("Training: A loss that converts num_items_in_batch with int or float is assumed to divide by it")
def test_a_number_that_is_converted_is_taken_to_divide(tmp_path: Path) -> None:
    def first_loss(**arguments: Any) -> float:
        def divided(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
            return (outputs[0] - labels).square().sum() / float(num_items_in_batch)

        trainer = make_trainer(tmp_path, parts={"compute_loss_func": divided}, max_steps=1, **arguments)
        trainer.train()
        return losses(trainer)[0]

    with pytest.warns(UserWarning, match="was converted by `int` or `float`") as caught:
        parts = first_loss(gradient_accumulation_steps=3)
    assert len(caught) == 1
    assert parts == pytest.approx(first_loss(per_device_train_batch_size=6))


def test_compiled_models_show_it_too(tmp_path: Path) -> None:
    def first_loss(model: nn.Module, **arguments: Any) -> float:
        trainer = make_trainer(tmp_path, parts={"model": model}, max_steps=1, **arguments)
        trainer.train()
        return losses(trainer)[0]

    class Summing(Regression):
        def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None, **kwargs: Any) -> Any:
            outputs = self.linear(x)
            return ((outputs - labels) ** 2).sum() / kwargs.get("num_items_in_batch", len(x)), outputs

    for kind in (AnyKeyword, Summing):
        whole = first_loss(kind(), per_device_train_batch_size=6)
        parts = first_loss(kind(), gradient_accumulation_steps=3, torch_compile_backend="eager")
        assert parts == pytest.approx(whole, rel=1e-6)


def test_each_loss_is_computed_once(tmp_path: Path) -> None:
    class Logging(Trainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            self.log({"seen": 1.0})
            return super().compute_loss(*args, **kwargs)

    trainer = make_trainer(tmp_path, kind=Logging, parts={"model": Tokens()}, gradient_accumulation_steps=2)
    trainer.train()
    assert sum("seen" in entry for entry in trainer.state.log_history) == 10


def test_the_number_is_whole_and_may_be_copied(tmp_path: Path) -> None:
    with DivisorWatch() as watch:
        number = watch.mark(6, ITEMS)
        assert isinstance(number, int)
        assert f"{number:d} {number}" == "6 6"
        assert len(range(number)) == len("x" * number) == 6
        assert not watch.lost
        for copied in (copy.deepcopy(number), pickle.loads(pickle.dumps(number))):
            assert type(copied) is int
            assert copied == 6
        assert watch.lost == {ITEMS}


def test_a_loss_of_nothing_tells_nothing(tmp_path: Path) -> None:
    """The first two batches have no loss, whatever it is divided by."""

    class Late(Rows):
        def __init__(self, size: int) -> None:
            super().__init__(size)
            with torch.no_grad():
                self.labels[:4] = Regression()(self.x[:4])[0]

    def trained(folder: str, **arguments: Any) -> Any:
        model = AnyKeyword()
        parts = {"model": model, "train_dataset": Late(12)}
        trainer = make_trainer(tmp_path / folder, parts=parts, num_train_epochs=1, **arguments)
        trainer.train()
        return trainer

    whole = trained("whole", per_device_train_batch_size=6)
    parts = trained("parts", per_device_train_batch_size=2, gradient_accumulation_steps=3)
    assert losses(parts) == pytest.approx(losses(whole), rel=1e-6)
    torch.testing.assert_close(parts.model.state_dict(), whole.model.state_dict(), rtol=1e-6, atol=1e-7)


class Summed(nn.Module):
    """Says that it sums, and may divide by the number that it is told."""

    reduction = "sum"

    def __init__(self, divides: bool) -> None:
        super().__init__()
        self.divides = divides

    def forward(self, outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
        total = (outputs[0] - labels).square().sum()
        return total / (len(labels) if num_items_in_batch is None else num_items_in_batch) if self.divides else total


@pytest.mark.fact(
    "Errors: A compute_loss_func with reduction='sum' that does not divide by the number of items is an error"
)
def test_a_loss_function_that_sums_must_divide(tmp_path: Path) -> None:
    def trainer(divides: bool) -> Any:
        parts = {"model": Regression(), "train_dataset": Rows(20), "compute_loss_func": Summed(divides)}
        return make_trainer(tmp_path, parts=parts, gradient_accumulation_steps=2)

    with pytest.raises(ConfigurationError, match="reduction='sum' and does not divide"):
        trainer(divides=False).train()
    trainer(divides=True).train()
