"""A variant of the step changes the complete gradient, as CONTRIBUTING.md shows."""

import torch
from torch import nn

from pytorch_accelerated import Trainer
from pytorch_accelerated.loop.context import Context
from pytorch_accelerated.loop.step import Step
from pytorch_accelerated.loop.training import Training
from tests.support.reference import regression_data, sgd, tiny_model


class Ascent(Step):
    _always_completes_gradients = True

    def complete_gradients(self) -> bool:
        is_skipped = super().complete_gradients()
        for parameter in self.parameters():
            parameter.grad = None if parameter.grad is None else -parameter.grad
        return is_skipped


class Ascending(Training):
    def kind_of_step(self) -> type[Step]:
        return Ascent


class Climber(Trainer):
    def _create_training(self, context: Context) -> Training:
        return Ascending(context)


def test_a_step_that_negates_gradients_climbs_as_far_as_the_plain_one_descends() -> None:
    moved = []
    for kind in (Trainer, Climber):
        before, model = tiny_model(), tiny_model()
        kind(model, nn.MSELoss(), sgd(model), callbacks=()).train(
            regression_data(8), None, max_num_train_steps=1, gradient_accumulation_steps=2, per_device_batch_size=4
        )
        moved.append([after - start for after, start in zip(model.parameters(), before.parameters(), strict=True)])
    assert all(each.any() for each in moved[0])
    for down, up in zip(*moved, strict=True):
        torch.testing.assert_close(up, -down)
