"""Overridden hooks that call the default ones: weights and ignored targets of torch's losses count as by hand."""

import math
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import ConcatDataset, StackDataset, TensorDataset

from pytorch_accelerated import Trainer
from tests.support.reference import TOLERANCE, assert_same_parameters

SIZE = 21
INPUTS = torch.randn(SIZE, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
LABELS = torch.arange(SIZE) // 8
WITH_IGNORED = torch.where(torch.arange(SIZE) % 5 < 2, -100, LABELS)
WEIGHTS = torch.tensor([1.0, 9.0, 0.5], dtype=torch.float64)
IN_ORDER: dict[str, Any] = {"shuffle": False}
DATA: dict[str, Any] = {
    "tuple": (INPUTS, WITH_IGNORED),
    "concatenated": ConcatDataset(
        [TensorDataset(INPUTS[:9], WITH_IGNORED[:9]), TensorDataset(INPUTS[9:], WITH_IGNORED[9:])]
    ),
    "stacked": StackDataset(INPUTS, WITH_IGNORED),  # type: ignore[arg-type]
    "pairs": list(zip(INPUTS, WITH_IGNORED, strict=True)),
    "pairs of numbers": list(zip(INPUTS, WITH_IGNORED.tolist(), strict=True)),
}


class CallsSuper(Trainer):
    def calculate_train_batch_loss(self, batch: Any) -> dict[str, Any]:
        inputs, targets = batch
        return super().calculate_train_batch_loss((inputs, targets))

    def calculate_eval_batch_loss(self, batch: Any) -> dict[str, Any]:
        return super().calculate_eval_batch_loss(batch)


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(4, 3).double()


def trained(base: type[Trainer], data: Any, loss: Any, steps: int) -> tuple[Trainer, float]:
    """After one epoch, with the evaluation loss of the untrained model."""
    trainer = base(net := model(), loss, torch.optim.SGD(net.parameters(), lr=0.5), callbacks=())
    before = trainer.evaluate(data, 4)["eval_loss_epoch"]
    trainer.train(data, 1, None, 3, gradient_accumulation_steps=steps, train_dataloader_kwargs=IN_ORDER)
    return trainer, before


def by_hand(
    data: tuple[torch.Tensor, torch.Tensor], weight: torch.Tensor | None, per_update: int
) -> tuple[nn.Module, float]:
    net = model()
    before = F.cross_entropy(net(data[0]), data[1], weight=weight).item()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    for rows in torch.arange(SIZE).split(per_update):
        optimizer.zero_grad()
        F.cross_entropy(net(data[0][rows]), data[1][rows], weight=weight).backward()
        optimizer.step()
    return net, before


@pytest.mark.parametrize("base", [Trainer, CallsSuper])
@pytest.mark.parametrize("steps", [1, 3, 8])
def test_class_weights_count_through_super(base: type[Trainer], steps: int) -> None:
    trainer, before = trained(base, (INPUTS, LABELS), nn.CrossEntropyLoss(weight=WEIGHTS), steps)
    expected, loss = by_hand((INPUTS, LABELS), WEIGHTS, 3 * steps)
    assert_same_parameters(trainer.model, expected)
    assert math.isclose(before, loss, rel_tol=TOLERANCE)


@pytest.mark.parametrize("base", [Trainer, CallsSuper])
@pytest.mark.parametrize("name", DATA)
def test_ignored_targets_of_data_in_memory_are_noticed(base: type[Trainer], name: str) -> None:
    trainer, before = trained(base, DATA[name], nn.CrossEntropyLoss(), 3)
    expected, loss = by_hand((INPUTS, WITH_IGNORED), None, 9)
    assert_same_parameters(trainer.model, expected)
    assert math.isclose(before, loss, rel_tol=TOLERANCE)


def test_a_part_of_a_batch_that_is_passed_on_counts_with_its_own_rows() -> None:
    class Kept(Trainer):
        def calculate_eval_batch_loss(self, batch: Any) -> dict[str, Any]:
            inputs, targets = batch
            kept = inputs[:, 0] > 0
            return super().calculate_eval_batch_loss((inputs[kept], targets[kept]))

    net = nn.Linear(4, 1).double()
    targets = torch.arange(SIZE).double()[:, None]
    kept = INPUTS[:, 0] > 0
    with torch.no_grad():
        expected = F.mse_loss(net(INPUTS[kept]), targets[kept]).item()
    found = Kept(net, nn.MSELoss(), None, callbacks=()).evaluate((INPUTS, targets), 11)["eval_loss_epoch"]
    assert math.isclose(found, expected, rel_tol=TOLERANCE)


class SaysRows(Trainer):
    said = "batch_size"

    def calculate_train_batch_loss(self, batch: Any) -> dict[str, Any]:
        inputs, targets = batch
        kept = targets != -100
        outputs = self.model(inputs[kept])
        loss = F.cross_entropy(outputs, targets[kept])
        return {"loss": loss, "model_outputs": outputs, "batch_size": len(inputs), self.said: int(kept.sum())}


class SaysItems(SaysRows):
    said = "num_items_in_batch"


def test_a_batch_size_other_than_the_rows_is_warned_of_where_it_matters() -> None:
    with pytest.warns(UserWarning, match="returned 1 as 'batch_size' for a batch of 3 rows.* 'num_items_in_batch'"):
        run(SaysRows, 3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(SaysRows, 1)  # each batch is an update, so its gradient is right
        trainer = run(SaysItems, 3)
    assert_same_parameters(trainer.model, by_hand((INPUTS, WITH_IGNORED), None, 9)[0])


def run(base: type[Trainer], steps: int) -> Trainer:
    trainer = base(net := model(), None, torch.optim.SGD(net.parameters(), lr=0.5), callbacks=())
    trainer.train(
        (INPUTS, WITH_IGNORED), 1, None, 3, gradient_accumulation_steps=steps, train_dataloader_kwargs=IN_ORDER
    )
    return trainer
