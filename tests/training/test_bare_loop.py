"""A loop written by hand gives the same weights as ours, to the bit."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from pytorch_accelerated import Trainer
from tests.support.reference import assert_same_parameters, windows_of_epoch

SEED = 3


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 3))


def adamw(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=0.01)


def momentum(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9, nesterov=True)


def cosine(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=30)


@pytest.mark.parametrize("as_rows", [False, True], ids=["whole batches", "row by row"])
@pytest.mark.parametrize("make_optimizer", [adamw, momentum])
def test_a_bare_hand_written_loop_gives_the_same_weights(
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer], as_rows: bool
) -> None:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(101, 5, generator=generator)
    targets = torch.randint(3, (101,), generator=generator)

    by_hand = model()
    optimizer = make_optimizer(by_hand)
    scheduler = cosine(optimizer)
    loss_func = nn.CrossEntropyLoss()
    torch.manual_seed(7)  # for dropout
    for epoch in range(3):
        by_hand.train()
        for rows in windows_of_epoch(101, 8, seed=SEED, epoch=epoch):
            loss = loss_func(by_hand(inputs[rows]), targets[rows])
            loss.backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()

    class Seeded(Trainer):
        def training_run_start(self) -> None:
            torch.manual_seed(7)

    ours = model()
    dataset: Any = list(zip(inputs, targets, strict=True)) if as_rows else TensorDataset(inputs, targets)
    trainer = Seeded(ours, loss_func, make_optimizer(ours), callbacks=(), seed=SEED)
    trainer.train(dataset, num_epochs=3, per_device_batch_size=8, create_scheduler_fn=cosine)
    assert_same_parameters(ours, by_hand, tolerance=0)
