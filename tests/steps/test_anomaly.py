"""`detect_anomaly` ends a run at the first NaN of a backward pass, and names the module in which it came up."""

import pytest
import torch
from torch import nn

from pytorch_accelerated import Trainer
from pytorch_accelerated.errors import ArgumentTypeError
from tests.support.resuming import assert_same

INPUTS = torch.randn(12, 3, generator=torch.Generator().manual_seed(1))
TARGETS = INPUTS[:, :2].clone()


class RootOfZero(nn.Module):
    """A loss that is finite, with a gradient that is not."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs + (inputs * 0).sqrt() * 0


class Block(nn.Module):
    """Layers, and an operation of its own between them."""

    def __init__(self, *, has_root: bool) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.act = nn.ReLU(inplace=True)
        self.rest = nn.Identity()
        self.last = nn.Linear(4, 3)
        self.has_root = has_root

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.rest(self.act(self.first(inputs)))
        if self.has_root:
            hidden = hidden + (hidden * 0).sqrt() * 0
        return self.last(hidden)


def train(model: nn.Module, loss_func: nn.Module | None = None, **arguments: object) -> Trainer:
    trainer = Trainer(
        model, loss_func or nn.MSELoss(), torch.optim.SGD(model.parameters(), lr=0.01), callbacks=(), seed=1
    )
    trainer.train((INPUTS, TARGETS), 1, None, 4, detect_anomaly=True, **arguments)  # type: ignore[arg-type]
    return trainer


class LossWithRoot(nn.Module):
    def forward(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(outputs, targets) + (outputs * 0).sqrt().sum() * 0


@pytest.mark.parametrize(
    ("layers", "loss", "place"),
    [
        ([nn.Linear(3, 3), RootOfZero(), nn.Linear(3, 2)], None, "the module '1' (RootOfZero)"),
        ([Block(has_root=True), nn.Linear(3, 2)], None, "the module '0' (Block)"),
        ([Block(has_root=False), RootOfZero(), nn.Linear(3, 2)], None, "the module '1' (RootOfZero)"),
        ([Block(has_root=False), nn.Linear(3, 2)], LossWithRoot(), "the loss function, or to what follows the model"),
    ],
)
@pytest.mark.parametrize("accumulation", [1, 2])
def test_the_note_names_the_module(
    layers: list[nn.Module], loss: nn.Module | None, place: str, accumulation: int
) -> None:
    with (
        pytest.raises(RuntimeError, match="returned nan values") as caught,
        pytest.warns(UserWarning, match="Traceback of forward call"),
    ):
        train(nn.Sequential(*layers), loss, gradient_accumulation_steps=accumulation)
    (note,) = caught.value.__notes__  # type: ignore[attr-defined]
    assert f"It belongs to {place}." in note
    assert "the backward pass" in note


def test_a_healthy_run_is_the_same_and_leaves_nothing_behind() -> None:
    def model() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(Block(has_root=False), nn.Dropout(0.2), nn.Linear(3, 2))

    watched = train(model())
    trainer = Trainer(plain := model(), nn.MSELoss(), torch.optim.SGD(plain.parameters(), lr=0.01), (), seed=1)
    trainer.train((INPUTS, TARGETS), 1, None, 4)
    assert_same(watched.model.state_dict(), plain.state_dict())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in watched.model.modules())
    assert not torch.is_anomaly_enabled()


def test_anything_but_a_bool_is_refused() -> None:
    trainer = Trainer(model := nn.Linear(3, 2), nn.MSELoss(), torch.optim.SGD(model.parameters(), lr=0.01))
    with pytest.raises(ArgumentTypeError, match="`detect_anomaly` is 'yes'"):
        trainer.train((INPUTS, TARGETS), 1, detect_anomaly="yes")  # type: ignore[arg-type]
