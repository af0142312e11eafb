"""Runs under torchrun: the schedule of several ranks is as long as a run that ends within an epoch."""

import functools
import os
from typing import Any

import pytest
import torch
from torch import nn

from pytorch_accelerated import Trainer, TrainerPlaceholderValues
from pytorch_accelerated.callbacks import TrainerCallback
from tests.support.reference import regression_data, sgd, tiny_model

assert int(os.environ["WORLD_SIZE"]) == 2
rates: list[float] = []


class Rates(TrainerCallback):
    """The learning rate of each update."""

    def on_optimizer_step_start(self, trainer: Trainer, **kwargs: Any) -> None:
        rates.append(float(trainer.optimizer.param_groups[0]["lr"]))


def one_cycle(**length: Any) -> Any:
    return functools.partial(torch.optim.lr_scheduler.OneCycleLR, max_lr=0.8, **length)


model = tiny_model()
trainer = Trainer(model, nn.MSELoss(), sgd(model), callbacks=[Rates()])
create = one_cycle(
    total_steps=TrainerPlaceholderValues.NUM_EPOCHS * TrainerPlaceholderValues.NUM_UPDATE_STEPS_PER_EPOCH
)
# 20 rows are five updates of two ranks with two rows each.
trainer.train(regression_data(20), 1, per_device_batch_size=2, max_num_train_steps=7, create_scheduler_fn=create)
assert trainer._accelerator.num_processes == 2

alone = sgd(tiny_model())
scheduler = one_cycle(total_steps=7)(alone)
expected = []
for _ in range(7):
    expected.append(float(alone.param_groups[0]["lr"]))
    alone.step()
    scheduler.step()
assert rates == pytest.approx(expected, rel=1e-12)
