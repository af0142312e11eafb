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


class TokenTrainer(Trainer):
    """Sequences with 1 to 4 real tokens; the loss is the mean over the tokens of a batch."""

    def calculate_train_batch_loss(self, batch):
        inputs, targets, mask = batch
        errors = (self.model(inputs) - targets).square().mean(-1)
        count = mask.sum()
        loss = (errors * mask).sum() / count
        return {
            "loss": loss,
            "model_outputs": None,
            "batch_size": len(inputs),
            "num_items_in_batch": self.count(count),
        }

    def count(self, count: torch.Tensor) -> "torch.Tensor | int":
        return count


class CountsOnTheHost(TokenTrainer):
    def count(self, count: torch.Tensor) -> int:
        return int(count)


class CountsBeforehand(TokenTrainer):
    def calculate_train_batch_loss(self, batch):
        output = super().calculate_train_batch_loss(batch)
        del output["num_items_in_batch"]
        return output

    def count_batch_items(self, batch):
        return int(batch[2].sum())


def token_data(size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows of 4 tokens with 3 features each, of which the first 1 to 4 are real."""
    inputs, targets = regression_data(4 * size)
    lengths = torch.arange(size) * 7 % 4 + 1
    mask = torch.arange(4)[None, :] < lengths[:, None]
    return inputs.view(size, 4, 3), targets.view(size, 4, 2), mask.double()


@pytest.mark.parametrize("kind", [TokenTrainer, CountsOnTheHost, CountsBeforehand])
@pytest.mark.parametrize("size", [1, 5, 7, 12, 13])
def test_losses_per_token_are_weighted_by_tokens_over_the_whole_update(kind: type[Trainer], size: int) -> None:
    data = token_data(size)
    trainer = kind(model := tiny_model(), None, sgd(model), callbacks=(), seed=SEED)
    trainer.train(
        data, 1, per_device_batch_size=2, gradient_accumulation_steps=3, train_dataloader_kwargs={"shuffle": False}
    )

    real = data[2].bool()
    expected, _ = train_reference(
        (data[0].flatten(0, 1), data[1].flatten(0, 1)),
        [torch.nonzero(_rows(real, window)).flatten() for window in torch.arange(size).split(6)],
    )
    assert_same_parameters(model, expected)


def _rows(real: torch.Tensor, window: torch.Tensor) -> torch.Tensor:
    chosen = torch.zeros_like(real)
    chosen[window] = real[window]
    return chosen.flatten()


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
