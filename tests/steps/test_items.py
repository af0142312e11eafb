"""Where a loss is the mean over items other than samples, nothing depends on how the items came into batches."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from pytorch_accelerated import Trainer
from pytorch_accelerated.errors import HookOutputError
from pytorch_accelerated.loop.hook_output import adding_nothing
from tests.support.reference import TOLERANCE, assert_same_parameters, regression_data, tiny_model

LENGTHS = (3, 1, 4, 0, 2, 4, 1)  # one of which counts nothing


def token_data(size: int, *, shortest: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows of 4 tokens with 3 features each, of which between `shortest` and 4 are real."""
    inputs, targets = regression_data(4 * size)
    lengths = torch.tensor([max(shortest, LENGTHS[row % len(LENGTHS)]) for row in range(size)])
    mask = torch.arange(4)[None, :] < lengths[:, None]
    return inputs.view(size, 4, 3), targets.view(size, 4, 2), mask


def token_errors(model: nn.Module, data: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """The error of each real token."""
    inputs, targets, mask = data
    return (model(inputs) - targets).square().mean(-1)[mask]


def plain_sgd(model: nn.Module) -> torch.optim.Optimizer:
    """An optimizer that would not hide a gradient of the wrong size."""
    return torch.optim.SGD(model.parameters(), lr=0.1)


class TokenTrainer(Trainer):
    """Takes the mean over the tokens of a batch, which is 0 / 0 if there are none."""

    def calculate_train_batch_loss(self, batch: Any) -> dict[str, Any]:
        inputs, targets, mask = batch
        errors = (self.model(inputs) - targets).square().mean(-1)
        loss = (errors * mask).sum() / mask.sum()
        return {"loss": loss, "model_outputs": None, "batch_size": len(inputs), **self.counted(mask)}

    calculate_eval_batch_loss = calculate_train_batch_loss

    def counted(self, mask: torch.Tensor) -> dict[str, Any]:
        return {}


class CountsBeforehand(TokenTrainer):
    def count_batch_items(self, batch: Any) -> int:
        return int(batch[2].sum())


class CountsTensorsBeforehand(TokenTrainer):
    def count_batch_items(self, batch: Any) -> Any:
        return batch[2].sum()


def counts_late(kind: Callable[[torch.Tensor], Any]) -> type[TokenTrainer]:
    """A trainer whose hook returns this kind of count."""

    class CountsLate(TokenTrainer):
        def counted(self, mask: torch.Tensor) -> dict[str, Any]:
            return {"num_items_in_batch": kind(mask)}

    return CountsLate


BEFOREHAND: dict[str, type[TokenTrainer]] = {
    "int beforehand": CountsBeforehand,
    "tensor beforehand": CountsTensorsBeforehand,
}
LATE: dict[str, type[TokenTrainer]] = {
    "int": counts_late(lambda mask: int(mask.sum())),
    "int tensor": counts_late(lambda mask: mask.sum()),
    "float32 tensor": counts_late(lambda mask: mask.float().sum()),
    "float64 tensor": counts_late(lambda mask: mask.double().sum().reshape(1)),
}


def make(kind: type[TokenTrainer], *callbacks: Any) -> TokenTrainer:
    return kind(model := tiny_model(), None, plain_sgd(model), callbacks=callbacks, seed=5)  # type: ignore[arg-type]


@pytest.mark.parametrize("count", [-1, "3", True, float("nan"), torch.ones(2)])
def test_an_invalid_number_of_items_is_rejected(count: Any) -> None:
    class CountsWrongly(TokenTrainer):
        def count_batch_items(self, batch: Any) -> Any:
            return count

    with pytest.raises(HookOutputError, match="`count_batch_items` returned"):
        make(CountsWrongly).train(token_data(4), 1)


def test_an_evaluation_of_which_only_some_batches_can_be_counted_is_refused() -> None:
    class CountsSome(CountsBeforehand):
        def count_batch_items(self, batch: Any) -> Any:
            return None if len(batch[0]) == 1 else super().count_batch_items(batch)

    with pytest.raises(HookOutputError, match="a number for some batches of the evaluation, and None for others"):
        make(CountsSome).evaluate(token_data(5), 2)


@pytest.mark.parametrize("policy", [None, "skip"])
def test_a_batch_without_items_does_not_count_as_a_non_finite_loss(policy: Any) -> None:
    data = token_data(8)
    assert not data[2][3].any()

    def train(batch_size: int, steps: int) -> TokenTrainer:
        trainer = CountsBeforehand(model := tiny_model(), None, plain_sgd(model), seed=5)  # type: ignore[arg-type]
        arguments: dict[str, Any] = {"per_device_batch_size": batch_size, "gradient_accumulation_steps": steps}
        arguments |= {"train_dataloader_kwargs": {"shuffle": False}, "nonfinite_policy": policy}
        trainer.train(data, 2, data, eval_per_device_batch_size=1, **arguments)
        return trainer

    whole, parts = train(4, 1), train(1, 4)
    assert_same_parameters(parts.model, whole.model)
    assert parts.run_state.skipped_updates == 0
    for name in ("train_loss_epoch", "eval_loss_epoch"):
        values = [trainer.run_history.get_metric_values(name) for trainer in (parts, whole)]
        assert values[0] == pytest.approx(values[1], rel=TOLERANCE)


def test_a_loss_that_counts_nowhere_reaches_all_parameters_and_adds_nothing() -> None:
    model = tiny_model()
    outputs = model(torch.ones(2, 3).double())
    loss = adding_nothing((outputs * 0).sum() / 0 + outputs.log().sum())
    assert loss.item() == 0
    loss.backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
        assert not parameter.grad.any()
