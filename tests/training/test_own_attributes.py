"""Attributes of the trainer that a subclass defines in its own way are those that the run uses."""

from typing import Any

import pytest
import torch
from torch import nn

from pytorch_accelerated import Trainer
from tests.support.reference import assert_same_parameters, regression_data, sgd, tiny_model


class InTheClass(Trainer):
    scheduler: Any = None
    run_config: Any = None


class Kept:
    optimizer: Any = None


class InAMixin(Kept, Trainer):
    pass


class AsAProperty(Trainer):
    @property
    def model(self) -> Any:
        return self.network

    @model.setter
    def model(self, model: nn.Module) -> None:
        self.network = model


@pytest.mark.parametrize("kind", [InTheClass, InAMixin, AsAProperty])
def test_a_subclass_may_define_the_attributes_of_a_run_itself(kind: type[Trainer]) -> None:
    trained = [train(each) for each in (Trainer, kind)]
    assert_same_parameters(trained[1].model, trained[0].model, tolerance=0)
    usual, own = (each.optimizer.param_groups[0]["lr"] for each in trained)
    assert usual == own < 0.1


def train(kind: type[Trainer]) -> Trainer:
    trainer = kind(model := tiny_model(), nn.MSELoss(), sgd(model), callbacks=(), seed=1)
    trainer.train(
        regression_data(12),
        2,
        regression_data(4),
        per_device_batch_size=4,
        create_scheduler_fn=lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5),
    )
    return trainer
