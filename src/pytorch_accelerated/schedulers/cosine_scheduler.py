"""A learning rate that falls along half a cosine, and the one-cycle schedule of torch for the length of a run."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import OneCycleLR

from pytorch_accelerated.errors import ConfigurationError
from pytorch_accelerated.facts.placeholders import Placeholder, TrainerPlaceholderValues
from pytorch_accelerated.ranks.optimizers import Optimizers, Schedules
from pytorch_accelerated.schedulers.warmup_scheduler import DecayLrScheduler, check_above_0

SchedulerT = TypeVar("SchedulerT", bound="CosineLrScheduler")


class CosineLrScheduler(DecayLrScheduler):
    """A linear warmup, half a cosine from the end of the warmup to the start of the cooldown, then the minimum.

    With T updates between warmup and cooldown, the rate of update t is
    ``lr_min + 0.5 * (peak - lr_min) * (1 + cos(pi * t**k_decay / T**k_decay))``. The peak is each group's own rate.

    Args:
        optimizer: the optimizer.
        total_num_epochs: epochs of the run, including warmup and cooldown.
        num_update_steps_per_epoch: optimizer updates per epoch.
        k_decay: above 1 the rate stays high for longer and falls faster later; below 1 the other way round.
        lr_min: the minimum; a group with a lower peak stays at its peak.
        min_lr_ratio: if given, the minimum is this share of each group's peak instead.
        num_warmup_epochs: duration of the warmup, which may be a fraction; rounded to updates.
        warmup_starting_lr: rate of update 0 of the warmup; a group with a lower peak starts at its peak.
        warmup_starting_lr_ratio: if given, update 0 has this share of each group's peak instead.
        num_cooldown_epochs: how long the minimum is kept at the end of the run; rounded to updates.

    Raises:
        ConfigurationError: if an argument is out of its range, or warmup and cooldown are longer than the run.

    Sources: Loshchilov and Hutter (2017), "SGDR", without restarts; Zhang and Li (2020), "k-decay", as timm has it.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        total_num_epochs: float,
        num_update_steps_per_epoch: float,
        k_decay: float = 1.0,
        lr_min: float = 1e-6,
        min_lr_ratio: float | None = None,
        num_warmup_epochs: float = 0,
        warmup_starting_lr: float = 1e-6,
        warmup_starting_lr_ratio: float | None = None,
        num_cooldown_epochs: float = 0,
    ) -> None:
        check_above_0(self, k_decay=k_decay)
        super().__init__(
            optimizer,
            total_num_epochs,
            num_update_steps_per_epoch,
            lr_min,
            min_lr_ratio,
            num_warmup_epochs,
            warmup_starting_lr,
            warmup_starting_lr_ratio,
            num_cooldown_epochs,
        )
        self.k_decay = k_decay

    @classmethod
    def create_scheduler_fn(
        cls: type[SchedulerT],
        total_num_epochs: float | Placeholder = TrainerPlaceholderValues.NUM_EPOCHS,
        num_update_steps_per_epoch: float | Placeholder = TrainerPlaceholderValues.NUM_UPDATE_STEPS_PER_EPOCH,
        k_decay: float = 1.0,
        lr_min: float = 1e-6,
        min_lr_ratio: float | None = None,
        num_warmup_epochs: float | Placeholder = 0,
        warmup_starting_lr: float = 1e-6,
        warmup_starting_lr_ratio: float | None = None,
        num_cooldown_epochs: float | Placeholder = 0,
    ) -> functools.partial[SchedulerT]:
        """A function that makes this scheduler for an optimizer, for the `create_scheduler_fn` of `Trainer.train`.

        Takes the arguments of the constructor; numbers that are known when the run starts may be left out or
        expressed with `TrainerPlaceholderValues`.
        """
        lengths = (total_num_epochs, num_update_steps_per_epoch)
        warmup = (num_warmup_epochs, warmup_starting_lr, warmup_starting_lr_ratio, num_cooldown_epochs)
        return super().create_scheduler_fn(*lengths, k_decay, lr_min, min_lr_ratio, *warmup)

    def get_height(self, progress: float) -> float:
        """Half a cosine of the progress, bent by `k_decay`."""
        return 0.5 * (1 + math.cos(math.pi * progress**self.k_decay))


def one_cycle(max_lr: float | Sequence[float] | None = None, **settings: Any) -> Callable[..., OneCycleLR | Schedules]:
    """The one-cycle schedule over a whole run, for the `create_scheduler_fn` of `Trainer.train`.

    ::

        trainer.train(train_dataset, num_epochs=5, create_scheduler_fn=one_cycle(1e-2))

    The rate rises to its maximum in the first 30 % of the updates, and then falls to almost 0, while the momentum does
    the opposite. Source: Smith and Topin (2017), "Super-convergence", arXiv 1708.07120.

    Args:
        max_lr: the highest rate, or one for each parameter group; default: the rates that the groups have. Each of
            multiple optimizers gets a schedule of its own.
        settings: of `torch.optim.lr_scheduler.OneCycleLR`, such as ``pct_start=0.3``.
    """
    placeholders = TrainerPlaceholderValues
    total = placeholders.NUM_EPOCHS * placeholders.NUM_UPDATE_STEPS_PER_EPOCH
    return functools.partial(_make, total_steps=total, max_lr=max_lr, **settings)


def _make(optimizer: torch.optim.Optimizer, *, max_lr: Any, **settings: Any) -> OneCycleLR | Schedules:
    groups = optimizer.param_groups
    highest = [group["lr"] for group in groups] if max_lr is None else max_lr
    if not isinstance(optimizer, Optimizers):
        return OneCycleLR(optimizer, highest, **settings)
    highest = highest if isinstance(highest, Sequence) else [highest] * len(groups)
    if len(highest) != len(groups):
        raise ConfigurationError(f"`max_lr` has {len(highest)} rates for {len(groups)} groups. Give one for each.")
    rates, made = iter(highest), {}
    for name, one in optimizer.by_name.items():  # each has a momentum of its own kind
        made[name] = OneCycleLR(one, [next(rates) for _ in one.param_groups], **settings)
    return Schedules(made)
