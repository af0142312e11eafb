"""Learning rates with a linear warmup, and two schedules that do not depend on the length of the run."""

from __future__ import annotations

import abc
import functools
import math
from typing import Any, TypeVar

from torch.optim import Optimizer

from pytorch_accelerated.errors import ConfigurationError
from pytorch_accelerated.facts.placeholders import TrainerPlaceholderValues
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
    def create_scheduler_fn(cls: type[SchedulerT], **kwargs: Any) -> functools.partial[SchedulerT]:
        """A function that makes this scheduler for an optimizer, for the `create_scheduler_fn` of `Trainer.train`.

        Takes the arguments of the constructor by name; each may be an expression of `TrainerPlaceholderValues`. The
        numbers of epochs and of updates per epoch may be left out, since the trainer knows them.
        """
        known = {"num_update_steps_per_epoch": TrainerPlaceholderValues.NUM_UPDATE_STEPS_PER_EPOCH}
        return functools.partial(cls, **{**known, **kwargs})

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
    """A linear warmup, then the peak. The arguments are those of `WarmupLrScheduler`."""

    def get_lr_after_warmup(self, num_updates: int, peak: float) -> float:
        """The peak."""
        return peak


class InverseSqrtLrScheduler(WarmupLrScheduler):
    """A linear warmup of w updates, then ``peak * sqrt(w / u)`` in update u. Suits runs of unknown length.

    Without a warmup, the rate is ``peak / sqrt(u + 1)``. The arguments are those of `WarmupLrScheduler`.

    Source: Vaswani et al. (2017), "Attention is all you need", section 5.3.
    """

    def get_lr_after_warmup(self, num_updates: int, peak: float) -> float:
        """The peak divided by the square root of the number of updates, in units of the warmup."""
        if self.num_warmup_updates == 0:
            return peak / math.sqrt(num_updates + 1)
        return peak * math.sqrt(self.num_warmup_updates / num_updates)


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
