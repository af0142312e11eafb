"""The one-cycle schedule of torch, for the length of a run."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.optim.lr_scheduler import OneCycleLR

from pytorch_accelerated.facts.placeholders import TrainerPlaceholderValues


def one_cycle(max_lr: float | Sequence[float] | None = None, **settings: Any) -> Callable[..., OneCycleLR]:
    """The one-cycle schedule over a whole run, for the `create_scheduler_fn` of `Trainer.train`.

    ::

        trainer.train(train_dataset, num_epochs=5, create_scheduler_fn=one_cycle(1e-2))

    The rate rises to its maximum in the first 30 % of the updates, and then falls to almost 0, while the momentum does
    the opposite. Source: Smith and Topin (2017), "Super-convergence", arXiv 1708.07120.

    Args:
        max_lr: the highest rate, or one for each parameter group; default: the rates that the groups have.
        settings: of `torch.optim.lr_scheduler.OneCycleLR`, such as ``pct_start=0.3``.
    """
    placeholders = TrainerPlaceholderValues
    total = placeholders.NUM_EPOCHS * placeholders.NUM_UPDATE_STEPS_PER_EPOCH
    return functools.partial(_make, total_steps=total, max_lr=max_lr, **settings)


def _make(optimizer: torch.optim.Optimizer, *, total_steps: Any, max_lr: Any, **settings: Any) -> OneCycleLR:
    highest = [group["lr"] for group in optimizer.param_groups] if max_lr is None else max_lr
    return OneCycleLR(optimizer, highest, total_steps=total_steps, **settings)
