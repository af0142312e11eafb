"""Warnings, at the start of a run, about learning rates with which little will be learned."""

from __future__ import annotations

from typing import Any

from torch.optim import lr_scheduler

from pytorch_accelerated.callbacks.warning import warn_user
from pytorch_accelerated.processes.ranks import Ranks
from pytorch_accelerated.training.hooks import TrainerHooks, overrides
from pytorch_accelerated.training.settings import TrainSettings

_LEFT_OVER = 1e-3  # of the first learning rate: what a schedule leaves at its end
# They multiply the rate that they find; torch's others begin with the first one.
_CHANGE_THE_CURRENT_RATE = (
    lr_scheduler.CosineAnnealingLR,
    lr_scheduler.ExponentialLR,
    lr_scheduler.MultiplicativeLR,
    lr_scheduler.MultiStepLR,
    lr_scheduler.PolynomialLR,
    lr_scheduler.StepLR,
)


def warn_of_rates(hooks: TrainerHooks, settings: TrainSettings, ranks: Ranks) -> None:
    """Warn about rates that an earlier run has left, and about a schedule that is over within the first epoch."""
    _warn_of_rates_left_over(hooks, ranks)
    if settings.step_scheduler == "update" and not overrides(hooks, "scheduler_step"):
        _warn_of_counted_epochs(hooks, ranks)


def _warn_of_rates_left_over(hooks: TrainerHooks, ranks: Ranks) -> None:
    """Warn if the run would train at the very low learning rates with which the schedule of an earlier run ended."""
    groups, scheduler = getattr(hooks.optimizer, "param_groups", []), hooks.scheduler
    if scheduler is not None and type(scheduler) not in _CHANGE_THE_CURRENT_RATE:
        return
    rates = [(float(group["lr"]), float(group.get("initial_lr", group["lr"]))) for group in groups if "lr" in group]
    if rates and all(rate <= _LEFT_OVER * first and first > 0 for rate, first in rates):
        rate, first = rates[0]
        warn_user(
            ranks,
            f"The learning rate is {rate:.3g}: the schedule of an earlier run has left it there, from {first:.3g} on, "
            + ("and this run has none" if scheduler is None else f"and {type(scheduler).__name__} begins with it")
            + ". Pass `create_scheduler_fn` for another schedule, or set the rate in each of "
            "`trainer.optimizer.param_groups`.",
        )


def _warn_of_counted_epochs(hooks: TrainerHooks, ranks: Ranks) -> None:
    """Warn if the numbers of one of torch's schedulers seem to count epochs, although it is stepped after updates."""
    config = hooks.run_config
    updates, epochs = config.num_update_steps_per_epoch, config.num_epochs
    if updates is None or epochs is None or updates < 2 or epochs < 2:
        return
    what = _what_an_epoch_does(hooks.scheduler, updates, epochs)
    if what:
        warn_user(
            ranks,
            f"{type(hooks.scheduler).__name__} is stepped after each of the {updates} updates of an epoch, so {what}. "
            'If its numbers count epochs, pass `step_scheduler="epoch"`; otherwise count in updates, for example with '
            "TrainerPlaceholderValues.NUM_UPDATE_STEPS_PER_EPOCH.",
        )


def _what_an_epoch_does(scheduler: Any, updates: int, epochs: int) -> str:
    """What is odd about the first of several epochs with this schedule, or ""."""
    kind = type(scheduler)
    share = 1.0
    if kind is lr_scheduler.StepLR:
        share = scheduler.gamma ** (updates // scheduler.step_size)
    elif kind is lr_scheduler.ExponentialLR:
        share = scheduler.gamma**updates
    elif kind is lr_scheduler.PolynomialLR and scheduler.total_iters <= updates:
        share = 0.0
    elif kind is lr_scheduler.MultiStepLR and scheduler.milestones and max(scheduler.milestones) <= updates:
        return f"the first of {epochs} epochs passes all of its milestones"
    elif kind is lr_scheduler.CosineAnnealingLR and scheduler.T_max <= epochs:
        return f"it goes down and up again every {2 * scheduler.T_max} updates"
    return f"the first of {epochs} epochs multiplies the learning rate by {share:.1g}" if share <= _LEFT_OVER else ""
