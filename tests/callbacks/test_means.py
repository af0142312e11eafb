"""Means of what models and hooks return."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pytorch_accelerated import Trainer
from pytorch_accelerated.callbacks import RecordMeansCallback, StepBasedEvaluationCallback
from pytorch_accelerated.errors import HookOutputError
from tests.support.resuming import SaveAndStop

ROWS = {"inputs": torch.linspace(-1, 1, 22, dtype=torch.float64).view(11, 2)}


class TwoLosses(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1, dtype=torch.float64)
        nn.init.constant_(self.layer.weight, 0.5)
        nn.init.zeros_(self.layer.bias)

    def forward(self, inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        outputs = self.layer(inputs)
        small, squares = outputs.square().mean(), (outputs - 1).square()
        return {"small_loss": small, "squares": squares, "loss": small + squares.mean()}


def make(*callbacks: Any) -> Trainer:
    model = TwoLosses()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    means = RecordMeansCallback("small_loss", "squares")
    return Trainer(model, None, optimizer, [means, *callbacks], seed=3)


def train(trainer: Trainer, **kwargs: Any) -> dict[str, list[float]]:
    trainer.train(ROWS, 2, ROWS, per_device_batch_size=2, **kwargs)  # six batches, the last of one row
    history = trainer.run_history
    return {name: list(history.get_metric_values(name)) for name in history.get_metric_names() if "lr" not in name}


def test_means_are_over_samples_and_add_up_to_the_loss() -> None:
    found = train(make(StepBasedEvaluationCallback(3)))
    for prefix, loss in (("train", "train_loss_epoch"), ("eval", "eval_loss_epoch")):
        parts = zip(found[f"{prefix}_small_loss"], found[f"{prefix}_squares"], strict=True)
        assert [sum(part) for part in parts] == pytest.approx(found[loss], rel=1e-12)
    assert len(found["intermediate_eval_squares"]) == len(found["intermediate_eval_loss"]) > 0


class Kept(TwoLosses):
    """Its loss is the mean over the rows that are not marked."""

    def forward(  # type: ignore[override]
        self, inputs: torch.Tensor, marks: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        return super().forward(inputs[~marks])


class Beforehand(Trainer):
    def count_batch_items(self, batch: Any) -> int:
        return int((~batch["marks"]).sum())


class Late(Trainer):
    def calculate_train_batch_loss(self, batch: Any) -> dict[str, Any]:
        return {**super().calculate_train_batch_loss(batch), "num_items_in_batch": (~batch["marks"]).sum()}

    def calculate_eval_batch_loss(self, batch: Any) -> dict[str, Any]:
        return {**super().calculate_eval_batch_loss(batch), "num_items_in_batch": (~batch["marks"]).sum()}


@pytest.mark.parametrize("base", [Beforehand, Late])
def test_of_a_loss_over_items_the_parts_are_means_over_items(base: type[Trainer]) -> None:
    model = Kept()
    marks = torch.arange(11) % 4 == 1
    kept = ROWS["inputs"][~marks]
    with torch.no_grad():
        outputs = model.layer(kept)
    callback = RecordMeansCallback("small_loss", "squares")
    trainer = base(model, None, torch.optim.SGD(model.parameters(), 0.1), [callback], seed=3)
    found = trainer.evaluate({**ROWS, "marks": marks}, 3)
    assert found["eval_small_loss"] == pytest.approx(outputs.square().mean().item(), rel=1e-12)
    assert found["eval_squares"] == pytest.approx((outputs - 1).square().mean().item(), rel=1e-12)
    history = trainer.train({**ROWS, "marks": marks}, 1, None, 3)
    parts = [history.get_latest_metric(f"train_{name}") for name in ("small_loss", "squares")]
    assert sum(parts) == pytest.approx(history.get_latest_metric("train_loss_epoch"), rel=1e-12)


@pytest.mark.parametrize("updates", range(1, 12))
def test_a_run_resumed_at_any_update_has_the_same_means(updates: int, tmp_path: Path) -> None:
    expected = train(make())
    train(make(SaveAndStop(tmp_path / "state", updates)))
    found = train(make(), resume_from=tmp_path / "state")
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert found[name] == pytest.approx(values, rel=1e-14), name


def test_what_a_hook_returns_counts_too_and_a_missing_name_is_an_error() -> None:
    class Hooked(Trainer):
        def calculate_train_batch_loss(self, batch: Any) -> dict[str, Any]:
            return {**super().calculate_train_batch_loss(batch), "rows": len(batch["inputs"])}

    model = TwoLosses()
    means = RecordMeansCallback(["rows", "small_loss"])
    trainer = Hooked(model, None, torch.optim.SGD(model.parameters(), 0.1), [means])
    trainer.train(ROWS, 2, ROWS, per_device_batch_size=2)
    names = set(trainer.run_history.get_metric_names())
    assert trainer.run_history.get_latest_metric("train_rows") == pytest.approx((5 * 2 * 2 + 1) / 11)
    assert {"eval_small_loss"} == {name for name in names if name.startswith("eval_")} - {"eval_loss_epoch"}
    trainer.evaluate(ROWS)  # where training has told that there is such an entry
    for unknown in (lambda one: one.evaluate(ROWS), lambda one: Trainer.train(one, ROWS, 1, ROWS)):
        with pytest.raises(HookOutputError, match="finds no 'row' among"):
            unknown(Hooked(model, None, torch.optim.SGD(model.parameters(), 0.1), [RecordMeansCallback(["row"])]))
