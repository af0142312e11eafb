"""What a trainer, its run config and its history show as the last line of a notebook's cell."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from pytorch_accelerated import Trainer
from pytorch_accelerated.callbacks import EarlyStoppingCallback


def test_a_trainer_shows_its_parts_and_after_a_run_its_metrics() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
    model[0].bias.requires_grad_(False)
    groups: list[dict[str, Any]] = [
        {"params": model[0].weight, "lr": 0.5},
        {"params": model[1].parameters(), "weight_decay": 0.01},
    ]
    optimizer = torch.optim.SGD(groups, lr=torch.tensor(0.1))
    trainer = Trainer(model, nn.MSELoss(), optimizer, callbacks=(EarlyStoppingCallback(),))
    before = trainer._repr_html_()
    for shown in (
        "Sequential, 21 parameters, 17 of them trainable",
        "MSELoss",
        "12 parameters, lr 0.5, momentum 0, weight_decay 0",
        "5 parameters, lr 0.1, momentum 0, weight_decay 0.01",
        "EarlyStoppingCallback",
    ):
        assert shown in before, shown
    assert "train_loss_epoch" not in before
    data = torch.utils.data.TensorDataset(torch.randn(20, 3), torch.randn(20, 1))
    trainer.train(data, num_epochs=1, eval_dataset=data, per_device_batch_size=8)
    after = trainer._repr_html_()
    assert "train_loss_epoch" in after
    assert "eval_loss_epoch" in after
    for part in (trainer.run_config, trainer.run_history):
        assert type(part).__name__ in part._repr_html_()


def test_a_trainer_without_optimizer_and_loss_shows_that() -> None:
    class Own(Trainer):
        pass

    shown = Own(nn.Linear(2, 1), None, None, callbacks=())._repr_html_()
    for expected in ("<b>Own</b>", "the model&#x27;s own", "none"):
        assert expected in shown
