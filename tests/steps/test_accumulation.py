"""Accumulating k batches of n equals one batch of k * n: every remainder, every window, one process and several."""

import functools
import math
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import nn

from pytorch_accelerated import Trainer
from tests.support.reference import (
    TOLERANCE,
    assert_same_parameters,
    regression_data,
    sgd,
    tiny_model,
    train_reference,
    windows_of_epoch,
)

SEED = 5


def compare_with_big_batches(
    size: int,
    batch_size: int,
    steps: int,
    *,
    ranks: int,
    clip_norm: float | None = None,
    clip_value: float | None = None,
) -> None:
    """Train two epochs with accumulation on `ranks` ranks; the result must match that of one big batch per update."""
    data = regression_data(size)
    trainer = Trainer(model := tiny_model(), nn.MSELoss(), sgd(model), callbacks=(), seed=SEED)
    assert trainer._accelerator.num_processes == ranks
    history = trainer.train(
        data,
        num_epochs=2,
        per_device_batch_size=batch_size,
        gradient_accumulation_steps=steps,
        gradient_clip_norm=clip_norm,
        gradient_clip_value=clip_value,
    )
    per_update = batch_size * steps * ranks
    windows = [windows_of_epoch(size, per_update, seed=SEED, epoch=epoch) for epoch in range(2)]
    clip: Callable[[Iterable[nn.Parameter]], Any] | None = None
    if clip_norm is not None:
        clip = functools.partial(torch.nn.utils.clip_grad_norm_, max_norm=clip_norm)
    if clip_value is not None:
        clip = functools.partial(torch.nn.utils.clip_grad_value_, clip_value=clip_value)
    expected, losses = train_reference(data, [*windows[0], *windows[1]], clip=clip)

    case = f"N={size} B={batch_size} K={steps} W={ranks}"
    assert_same_parameters(model, expected)
    assert trainer.run_state.updates == len(windows[0]) + len(windows[1]), case
    first, second = history.get_metric_values("train_loss_epoch")
    for recorded, epoch, start in ((first, 0, 0), (second, 1, len(windows[0]))):
        sizes = [len(window) for window in windows[epoch]]
        mean = sum(loss * n for loss, n in zip(losses[start:], sizes, strict=False)) / size
        # With accumulation the recorded loss comes from the same weights as the big batch's.
        assert math.isclose(recorded, mean, rel_tol=TOLERANCE), case


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
