"""`detect_anomaly` ends a run at the first NaN of a backward pass, and torch shows the line that it belongs to."""

import pytest
import torch
from torch import nn

from pytorch_accelerated import Trainer
from tests.support.resuming import assert_same

INPUTS = torch.randn(12, 3, generator=torch.Generator().manual_seed(1))
TARGETS = INPUTS[:, :2].clone()


class RootOfZero(nn.Module):
    """A loss that is finite, with a gradient that is not."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs + (inputs * 0).sqrt() * 0


def train(model: nn.Module, **arguments: object) -> Trainer:
    trainer = Trainer(model, nn.MSELoss(), torch.optim.SGD(model.parameters(), lr=0.01), callbacks=(), seed=1)
    trainer.train((INPUTS, TARGETS), 1, None, 4, detect_anomaly=True, **arguments)  # type: ignore[arg-type]
    return trainer


@pytest.mark.parametrize("accumulation", [1, 2])
def test_the_first_nan_of_a_backward_pass_is_an_error_that_shows_its_line(accumulation: int) -> None:
    model = nn.Sequential(nn.Linear(3, 3), RootOfZero(), nn.Linear(3, 2))
    with (
        pytest.raises(RuntimeError, match="SqrtBackward0.* returned nan values") as caught,
        pytest.warns(UserWarning, match=r"Traceback of forward call[^^]*\(inputs \* 0\).sqrt\(\)"),
    ):
        train(model, gradient_accumulation_steps=accumulation)
    (note,) = caught.value.__notes__  # type: ignore[attr-defined]
    assert "the backward pass" in note


def test_a_healthy_run_is_the_same_and_leaves_nothing_behind() -> None:
    def model() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.2), nn.Linear(3, 2))

    watched = train(model())
    trainer = Trainer(plain := model(), nn.MSELoss(), torch.optim.SGD(plain.parameters(), lr=0.01), (), seed=1)
    trainer.train((INPUTS, TARGETS), 1, None, 4)
    assert_same(watched.model.state_dict(), plain.state_dict())
    assert not torch.is_anomaly_enabled()
