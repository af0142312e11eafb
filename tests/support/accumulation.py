"""Compares the trainer with the plain loop, on one process and on several."""

import functools
import math
from collections.abc import Callable, Iterable
from typing import Any

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
