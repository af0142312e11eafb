"""The learning rates of a run, before there is one."""

from __future__ import annotations

import copy
import os
import warnings
from collections import defaultdict
from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from pytorch_accelerated.errors import ConfigurationError
from pytorch_accelerated.facts.placeholders import replace_trainer_placeholder_values
from pytorch_accelerated.facts.settings import check_positive_count
from pytorch_accelerated.record.plotting import decorate, new_figure
from pytorch_accelerated.schedulers.scheduler_base import StatefulSchedulerBase

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MOST_GROUPS = 10  # in a figure: as many as matplotlib has colours


def scheduled_values(
    create_scheduler_fn: Callable[..., Any],
    num_epochs: int,
    num_updates_per_epoch: int,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    lr: float = 1.0,
    step_scheduler: str = "update",
    field: str = "lr",
) -> list[tuple[float, ...]]:
    """The learning rates with which a run would make its updates: for each update, one for each parameter group.

    Schedulers are created and stepped as a trainer does it: this library's and torch's, per update or per epoch, and
    timm's as `TrainerWithTimmScheduler` does. Nothing is trained, and the optimizer is not changed.

    Args:
        create_scheduler_fn: the argument of `Trainer.train`; placeholders in a `functools.partial` are filled in.
        num_epochs: the epochs of the run.
        num_updates_per_epoch: the optimizer updates of an epoch, over all ranks: batches of a rank divided by
            `gradient_accumulation_steps`, rounded up.
        optimizer: the optimizer of the run, with its parameter groups; without it, an AdamW with one group.
        lr: the rate of that AdamW. With 1.0, values are shares of the rate.
        step_scheduler: the argument of `Trainer.train`: "update" or "epoch".
        field: another field of the groups that is scheduled, such as "weight_decay" or "momentum".

    Raises:
        ConfigurationError, ArgumentTypeError: for invalid numbers, or a scheduler that depends on a metric.
        Any error of the scheduler, such as torch's for a `OneCycleLR` that is shorter than the run.
    """
    check_positive_count("num_epochs", num_epochs)
    check_positive_count("num_updates_per_epoch", num_updates_per_epoch)
    stand_in = _stand_in(optimizer, lr)
    planned = SimpleNamespace(run_config=_sizes(num_epochs, num_updates_per_epoch))
    scheduler = replace_trainer_placeholder_values(planned, create_scheduler_fn)(stand_in)
    if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
        raise ConfigurationError("ReduceLROnPlateau follows a metric of the run, so its rates are unknown before it.")
    is_of_timm = hasattr(scheduler, "step_update") and not isinstance(scheduler, StatefulSchedulerBase)
    values = []
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*lr_scheduler.step.*", UserWarning)  # it misses the optimizer's steps
        for epoch in range(num_epochs):
            for update in range(num_updates_per_epoch):
                values.append(tuple(float(group[field]) for group in stand_in.param_groups))
                if is_of_timm:
                    scheduler.step_update(num_updates=epoch * num_updates_per_epoch + update + 1)
                elif step_scheduler == "update":
                    scheduler.step()
            if is_of_timm:
                scheduler.step(epoch + 1)
            elif step_scheduler == "epoch":
                scheduler.step()
    return values


def plot_schedule(
    create_scheduler_fn: Callable[..., Any],
    num_epochs: int,
    num_updates_per_epoch: int,
    *,
    path: str | os.PathLike[str] | None = None,
    field: str = "lr",
    **arguments: Any,
) -> Figure:
    """A matplotlib figure of the learning rates that a run would have, over its epochs. Nothing is trained.

    Args:
        create_scheduler_fn, num_epochs, num_updates_per_epoch, field, arguments: see `scheduled_values`.
        path: also save the picture there; the suffix determines the format.

    Raises:
        MissingDependencyError: if matplotlib is not installed.
        Any error of `scheduled_values`.
    """
    values = scheduled_values(create_scheduler_fn, num_epochs, num_updates_per_epoch, field=field, **arguments)
    figure = new_figure(6, 3, needed_by="plot_schedule")
    axes = figure.add_subplot()
    epochs = [update / num_updates_per_epoch for update in range(len(values))]
    curves: dict[tuple[Any, ...], list[int]] = {}
    for index, curve in enumerate(zip(*values, strict=True)):
        curves.setdefault(curve, []).append(index)
    for curve, groups in list(curves.items())[:_MOST_GROUPS]:
        label = f"group{'s' if len(groups) > 1 else ''} {', '.join(map(str, groups))}"
        axes.plot([*epochs, num_epochs], [*curve, curve[-1]], drawstyle="steps-post", linewidth=1.8, label=label)
    updates = f"{num_updates_per_epoch} update{'s' if num_updates_per_epoch > 1 else ''}"
    decorate(axes, "learning rate" if field == "lr" else field, f"epoch ({updates} each)")
    axes.set_ylim(bottom=0)
    if len(curves) > 1:
        axes.legend(frameon=False)
    if path is not None:
        figure.savefig(path, dpi=150)
    return figure


def _stand_in(optimizer: Any, lr: float) -> torch.optim.Optimizer:
    """An optimizer like the given one, with the same groups, without parameters."""
    if optimizer is None:
        return torch.optim.AdamW([torch.zeros(1, requires_grad=True)], lr=lr)
    stand_in: torch.optim.Optimizer = copy.copy(optimizer)
    stand_in.state = defaultdict(dict)
    stand_in.param_groups = copy.deepcopy([{**group, "params": []} for group in optimizer.param_groups])
    return stand_in


def _sizes(num_epochs: int, num_updates_per_epoch: int) -> SimpleNamespace:
    """The fields of the run config of a run of this size from which placeholders read."""
    return SimpleNamespace(
        num_epochs=num_epochs,
        gradient_accumulation_steps=1,
        num_update_steps_per_epoch=num_updates_per_epoch,
        num_local_update_steps_per_epoch=num_updates_per_epoch,
        max_num_train_steps=num_epochs * num_updates_per_epoch,
        train_dataloader_len=num_updates_per_epoch,
        eval_dataloader_len=None,
    )
