"""Losses that are means over tokens instead of samples: the data, and trainers that count in every way."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from pytorch_accelerated import Trainer
from tests.support.reference import regression_data, tiny_model

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
