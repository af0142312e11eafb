"""An update that is left out because its loss is not finite tells which module's outputs were the first to be so."""

import math
from typing import Any

import pytest
import torch
from torch import nn

from pytorch_accelerated import Trainer
from tests.support.resuming import assert_same

INPUTS = torch.rand(12, 3, generator=torch.Generator().manual_seed(1)) + 0.1
TARGETS = INPUTS[:, :2].clone()


class Log(nn.Module):
    """Is not finite for rows that begin with 0."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs.clone().log()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop, self.log, self.linear = nn.BatchNorm1d(3), nn.Dropout(0.3), Log(), nn.Linear(3, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.linear(self.log(inputs)) + self.drop(self.norm(inputs))


class LossWithRoot(nn.Module):
    def forward(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(outputs, targets) / targets.abs().min()


def model_of(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Identity(), Block(), nn.Linear(3, 2))


def train(inputs: torch.Tensor, targets: torch.Tensor, loss: nn.Module | None = None, **more: Any) -> Trainer:
    model = model_of()
    trainer = Trainer(model, loss or nn.MSELoss(), torch.optim.SGD(model.parameters(), lr=0.01), (), seed=1)
    arguments = {"nonfinite_policy": "skip", "train_dataloader_kwargs": {"shuffle": False}, **more}
    trainer.train((inputs, targets), 1, None, 2, **arguments)
    return trainer


def with_bad_row(values: torch.Tensor, row: int, value: float) -> torch.Tensor:
    changed = values.clone()
    changed[row, 0] = value
    return changed


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"inputs": with_bad_row(INPUTS, 7, 0.0)}, r"from the module '1\.log'\."),
        ({"inputs": with_bad_row(INPUTS, 7, math.nan)}, "The batch itself has values that are NaN or infinite"),
        ({"targets": with_bad_row(TARGETS, 7, 0.0), "loss": LossWithRoot()}, "it comes from the loss function"),
        ({"inputs": with_bad_row(INPUTS, 7, 0.0), "gradient_accumulation_steps": 2}, r"from the module '1\.log'\."),
    ],
)
def test_the_warning_names_the_first_module(arguments: dict[str, Any], words: str) -> None:
    with pytest.warns(UserWarning, match=words):
        train(**{"inputs": INPUTS, "targets": TARGETS, **arguments})


def test_looking_for_the_module_leaves_no_trace() -> None:
    with pytest.warns(UserWarning, match=r"'1\.log'"):
        skipping = train(with_bad_row(INPUTS, 7, 0.0), TARGETS)
    rest = [row for row in range(12) if row not in (6, 7)]
    never = train(INPUTS[rest], TARGETS[rest])
    assert_same(skipping.model.state_dict(), never.model.state_dict())
    assert not any(module._forward_hooks for module in skipping.model.modules())
