"""Learning rates that decay from the peak to a minimum over a run of known length."""

from __future__ import annotations

import abc
import functools
import math
from typing import Any, TypeVar

from torch.optim import Optimizer

from pytorch_accelerated.errors import ConfigurationError
from pytorch_accelerated.facts.placeholders import TrainerPlaceholderValues
from pytorch_accelerated.schedulers.warmup_scheduler import (
    WarmupLrScheduler,
    check_above_0,
    check_not_negative,
    check_share,
    lowered_rate,
)

SchedulerT = TypeVar("SchedulerT", bound="DecayLrScheduler")


class DecayLrScheduler(WarmupLrScheduler):
    """A linear warmup to each group's own learning rate (its peak), then a decay to a minimum, which is kept.

    The first update after the warmup uses the peak. The minimum is reached in the first update of the cooldown or,
    without a cooldown, after the last update of the run. Subclasses define the shape of the decay.

    Args:
        optimizer: the optimizer.
        total_num_epochs: epochs of the run, including warmup and cooldown.
        num_update_steps_per_epoch: optimizer updates per epoch.
        lr_min: the minimum; a group with a lower peak stays at its peak.
        min_lr_ratio: if given, the minimum is this share of each group's peak instead.
        num_warmup_epochs: duration of the warmup, which may be a fraction; rounded to updates.
        warmup_starting_lr: rate of update 0 of the warmup; a group with a lower peak starts at its peak.
        warmup_starting_lr_ratio: if given, update 0 has this share of each group's peak instead.
        num_cooldown_epochs: how long the minimum is kept at the end of the run; rounded to updates.

    Raises:
        ConfigurationError: if an argument is out of its range, or warmup and cooldown are longer than the run.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        total_num_epochs: float,
        num_update_steps_per_epoch: float,
        lr_min: float = 1e-6,
        min_lr_ratio: float | None = None,
        num_warmup_epochs: float = 0,
        warmup_starting_lr: float = 1e-6,
        warmup_starting_lr_ratio: float | None = None,
        num_cooldown_epochs: float = 0,
    ) -> None:
        super().__init__(
            optimizer, num_update_steps_per_epoch, num_warmup_epochs, warmup_starting_lr, warmup_starting_lr_ratio
        )
        total_updates = round(total_num_epochs * num_update_steps_per_epoch)
        num_cooldown_updates = round(num_cooldown_epochs * num_update_steps_per_epoch)
        check_not_negative(self, num_cooldown_epochs=num_cooldown_epochs, lr_min=lr_min)
        check_share(self, min_lr_ratio=min_lr_ratio)
        if not 0 < total_updates >= self.num_warmup_updates + num_cooldown_updates:
            raise ConfigurationError(
                f"{type(self).__name__} cannot be made: warmup and cooldown together are "
                f"{self.num_warmup_updates + num_cooldown_updates} updates, and the run has {total_updates}. Shorten "
                "one, or make the run longer."
            )
        self.lr_min = lr_min
        self.min_lr_ratio = min_lr_ratio
        self.total_updates = total_updates
        self.num_cooldown_updates = num_cooldown_updates
        self.num_updates_before_cooldown = total_updates - num_cooldown_updates

    @classmethod
    def create_scheduler_fn(cls: type[SchedulerT], **kwargs: Any) -> functools.partial[SchedulerT]:
        """A function that makes this scheduler for an optimizer, see `WarmupLrScheduler.create_scheduler_fn`."""
        return super().create_scheduler_fn(**{"total_num_epochs": TrainerPlaceholderValues.NUM_EPOCHS, **kwargs})

    def get_lr_after_warmup(self, num_updates: int, peak: float) -> float:
        """The learning rate of a group with this peak, for the update that follows `num_updates` finished ones."""
        minimum = lowered_rate(peak, self.lr_min, self.min_lr_ratio)
        if num_updates >= self.num_updates_before_cooldown:
            return minimum
        num_decay_updates = self.num_updates_before_cooldown - self.num_warmup_updates
        return minimum + (peak - minimum) * self.get_height((num_updates - self.num_warmup_updates) / num_decay_updates)

    @abc.abstractmethod
    def get_height(self, progress: float) -> float:
        """The position between minimum and peak: 1 (the peak) at `progress` 0, falling to 0 (the minimum) at 1."""


class LinearLrScheduler(DecayLrScheduler):
    """A linear warmup, then a straight line to the minimum. The arguments are those of `DecayLrScheduler`."""

    def get_height(self, progress: float) -> float:
        """The remaining share of the decay."""
        return 1 - progress


class PolynomialLrScheduler(DecayLrScheduler):
    """A linear warmup, then a polynomial decay to the minimum.

    The arguments are those of `DecayLrScheduler`, and `power`: the rate falls as ``(1 - progress) ** power``, so 1 is a
    line, and 2 falls fast and ends gently.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        total_num_epochs: float,
        num_update_steps_per_epoch: float,
        power: float = 1.0,
        lr_min: float = 1e-6,
        min_lr_ratio: float | None = None,
        num_warmup_epochs: float = 0,
        warmup_starting_lr: float = 1e-6,
        warmup_starting_lr_ratio: float | None = None,
        num_cooldown_epochs: float = 0,
    ) -> None:
        check_above_0(self, power=power)
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
        self.power = power

    def get_height(self, progress: float) -> float:
        """A power of the remaining share of the decay."""
        return math.pow(1 - progress, self.power)
