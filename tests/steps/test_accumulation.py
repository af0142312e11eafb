"""Accumulating k batches of n equals one batch of k * n: every remainder, every window, one process and several."""

import pytest
import torch
from torch import nn

from pytorch_accelerated import Trainer
from tests.support.accumulation import SEED, compare_with_big_batches
from tests.support.reference import assert_same_parameters, regression_data, sgd, tiny_model, train_reference


@pytest.mark.parametrize(
    ("steps", "clip"), [(1, {}), (2, {}), (3, {}), (5, {}), (3, {"clip_norm": 0.05}), (2, {"clip_value": 0.01})]
)
def test_accumulation_equals_big_batches_for_every_remainder(steps: int, clip: dict[str, float]) -> None:
    batch_size = 3
    for size in range(1, batch_size * steps + 4):
        compare_with_big_batches(size, batch_size, steps, ranks=1, **clip)


def test_batches_of_unequal_size_count_by_their_samples() -> None:
    data = regression_data(11)
    batches = [[0, 1, 2, 3], [4], [5, 6], [7, 8, 9, 10]]
    trainer = Trainer(model := tiny_model(), nn.MSELoss(), sgd(model), callbacks=(), seed=SEED)
    trainer.train(data, 1, gradient_accumulation_steps=3, train_dataloader_kwargs={"batch_sampler": batches})

    expected, _ = train_reference(data, [torch.arange(0, 7), torch.arange(7, 11)])
    assert_same_parameters(model, expected)


def test_a_stream_accumulates_exactly_and_its_last_update_is_short() -> None:
    data = regression_data(11)
    trainer = Trainer(model := tiny_model(), nn.MSELoss(), sgd(model), callbacks=(), seed=SEED)
    batches = [(data[0][rows], data[1][rows]) for rows in torch.arange(11).split(2)]
    trainer.train((batch for batch in batches), 1, gradient_accumulation_steps=4)

    expected, _ = train_reference(data, [torch.arange(0, 8), torch.arange(8, 11)])
    assert_same_parameters(model, expected)
