"""Learning rates with a linear warmup, after which they stay, or decay to a minimum over a run of known length."""

from __future__ import annotations

import abc
import functools
import inspect
import math
from collections.abc import Mapping
from typing import Any, TypeVar

from torch.optim import Optimizer

from pytorch_accelerated.errors import ConfigurationError
from pytorch_accelerated.facts.placeholders import Placeholder, TrainerPlaceholderValues
from pytorch_accelerated.schedulers.scheduler_base import StatefulSchedulerBase

SchedulerT = TypeVar("SchedulerT", bound="WarmupLrScheduler")


class WarmupLrScheduler(StatefulSchedulerBase):
    """A linear warmup to each group's own learning rate (its peak). Subclasses define the schedule after it.

    Update 0 uses the starting rate, the first update after the warmup uses the peak.

    Args:
        optimizer: the optimizer.
        num_update_steps_per_epoch: optimizer updates per epoch.
        num_warmup_epochs: duration of the warmup, which may be a fraction; rounded to updates.
        warmup_starting_lr: rate of update 0; a group with a lower peak starts at its peak.
        warmup_starting_lr_ratio: if given, update 0 has this share of each group's peak instead.

    Raises:
        ConfigurationError: if an argument is out of its range.
    """

    _known_at_start: Mapping[str, Placeholder] = {
        "num_update_steps_per_epoch": TrainerPlaceholderValues.NUM_UPDATE_STEPS_PER_EPOCH
    }

    def __init__(
        self,
        optimizer: Optimizer,
        num_update_steps_per_epoch: float,
        num_warmup_epochs: float = 0,
        warmup_starting_lr: float = 1e-6,
        warmup_starting_lr_ratio: float | None = None,
    ) -> None:
        check_above_0(self, num_update_steps_per_epoch=num_update_steps_per_epoch)
        check_not_negative(self, num_warmup_epochs=num_warmup_epochs, warmup_starting_lr=warmup_starting_lr)
        check_share(self, warmup_starting_lr_ratio=warmup_starting_lr_ratio)
        super().__init__(optimizer)
        self.num_warmup_updates = round(num_warmup_epochs * num_update_steps_per_epoch)
        self.warmup_starting_lr = warmup_starting_lr
        self.warmup_starting_lr_ratio = warmup_starting_lr_ratio

    @classmethod
    def create_scheduler_fn(cls: type[SchedulerT], *args: Any, **kwargs: Any) -> functools.partial[SchedulerT]:
        """A function that makes this scheduler for an optimizer, for the `create_scheduler_fn` of `Trainer.train`.

        Takes the arguments of the constructor without the optimizer; each may be an expression of
        `TrainerPlaceholderValues`. The numbers of epochs and of updates per epoch may be left out, since the trainer
        knows them.
        """
        _, *given = inspect.signature(cls).bind_partial(None, *args).arguments.items()
        return functools.partial(cls, **{**cls._known_at_start, **kwargs, **dict(given)})

    def get_updated_values(self, num_updates: int) -> list[float]:
        """The learning rate of each group for the update that follows `num_updates` finished ones."""
        if num_updates >= self.num_warmup_updates:
            return [self.get_lr_after_warmup(num_updates, peak) for peak in self.base_lr_values]
        progress = num_updates / self.num_warmup_updates
        starts = [
            lowered_rate(peak, self.warmup_starting_lr, self.warmup_starting_lr_ratio) for peak in self.base_lr_values
        ]
        return [start + (peak - start) * progress for start, peak in zip(starts, self.base_lr_values, strict=True)]

    @abc.abstractmethod
    def get_lr_after_warmup(self, num_updates: int, peak: float) -> float:
        """The learning rate of a group with this peak, for the update that follows `num_updates` finished ones."""


class ConstantLrScheduler(WarmupLrScheduler):
    """A linear warmup, then the peak. Takes the arguments of `WarmupLrScheduler`."""

    def get_lr_after_warmup(self, num_updates: int, peak: float) -> float:
        """The peak."""
        return peak


class InverseSqrtLrScheduler(WarmupLrScheduler):
    """A linear warmup of w updates, then ``peak * sqrt(w / u)`` in update u. Suits runs of unknown length.

    Without a warmup, the rate is ``peak / sqrt(u + 1)``. Takes the arguments of `WarmupLrScheduler`.

    Source: Vaswani et al. (2017), "Attention is all you need", section 5.3.
    """

    def get_lr_after_warmup(self, num_updates: int, peak: float) -> float:
        """The peak divided by the square root of the number of updates, in units of the warmup."""
        if self.num_warmup_updates == 0:
            return peak / math.sqrt(num_updates + 1)
        return peak * math.sqrt(self.num_warmup_updates / num_updates)


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

    _known_at_start = {**WarmupLrScheduler._known_at_start, "total_num_epochs": TrainerPlaceholderValues.NUM_EPOCHS}

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
                f"{self.num_warmup_updates + num_cooldown_updates} updates, and the run has {total_updates}."
            )
        self.lr_min = lr_min
        self.min_lr_ratio = min_lr_ratio
        self.total_updates = total_updates
        self.num_cooldown_updates = num_cooldown_updates
        self.num_updates_before_cooldown = total_updates - num_cooldown_updates

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
    """A linear warmup, then a straight line to the minimum. Takes the arguments of `DecayLrScheduler`."""

    def get_height(self, progress: float) -> float:
        """The remaining share of the decay."""
        return 1 - progress


class PolynomialLrScheduler(DecayLrScheduler):
    """A linear warmup, then a polynomial decay to the minimum.

    Takes the arguments of `DecayLrScheduler`, and `power`: the rate falls as ``(1 - progress) ** power``, so 1 is a
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


def lowered_rate(peak: float, rate: float, ratio: float | None) -> float:
    """`ratio` times the peak if it is given, else `rate`, but never above the peak: a frozen group stays at 0."""
    return min(rate, peak) if ratio is None else ratio * peak


def check_above_0(scheduler: object, **arguments: float) -> None:
    """Reject numbers that are not above 0."""
    _refuse(scheduler, "is not above 0", {name: value for name, value in arguments.items() if not value > 0})


def check_not_negative(scheduler: object, **arguments: float) -> None:
    """Reject numbers below 0."""
    _refuse(scheduler, "is negative", {name: value for name, value in arguments.items() if not value >= 0})


def check_share(scheduler: object, **arguments: float | None) -> None:
    """Reject numbers that are not between 0 and 1; None is accepted."""
    wrong = {name: value for name, value in arguments.items() if value is not None and not 0 <= value <= 1}
    _refuse(scheduler, "is not a share, a number from 0 to 1", wrong)


def _refuse(scheduler: object, complaint: str, arguments: dict[str, Any]) -> None:
    if arguments:
        told = ", ".join(f"{name}={value} {complaint}" for name, value in arguments.items())
        raise ConfigurationError(f"{type(scheduler).__name__} cannot be made: {told}.")
