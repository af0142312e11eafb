"""The schedule that is shown before a run is the one that the run has."""

import functools
from pathlib import Path
from typing import Any

import pytest
import timm.scheduler
import torch
from torch import nn
from torch.optim import lr_scheduler

from pytorch_accelerated import Trainer, TrainerPlaceholderValues
from pytorch_accelerated.callbacks import TrainerCallback
from pytorch_accelerated.errors import ArgumentTypeError, ConfigurationError
from pytorch_accelerated.schedulers import (
    CosineLrScheduler,
    LinearLrScheduler,
    WSDLrScheduler,
    one_cycle,
    plot_schedule,
    scheduled_values,
)
from pytorch_accelerated.trainer import TrainerWithTimmScheduler
from tests.support.reference import regression_data

EPOCHS, UPDATES = 4, 5
TORCH: Any = lr_scheduler
TIMMS: Any = timm.scheduler
VALUES = TrainerPlaceholderValues
PER_EPOCH: Any = functools.partial(lr_scheduler.StepLR, step_size=2, gamma=0.1)
ONE_CYCLE: Any = functools.partial(
    TORCH.OneCycleLR,
    max_lr=0.3,
    epochs=VALUES.NUM_EPOCHS,
    steps_per_epoch=VALUES.NUM_UPDATE_STEPS_PER_EPOCH,
)
TIMM: Any = functools.partial(
    TIMMS.CosineLRScheduler,
    t_initial=VALUES.NUM_EPOCHS * VALUES.NUM_UPDATE_STEPS_PER_EPOCH,
    warmup_t=3,
    warmup_lr_init=0.001,
    t_in_epochs=False,
)
TIMM_EPOCHS = functools.partial(TIMMS.StepLRScheduler, decay_t=2, decay_rate=0.5)


class Watching(TrainerCallback):
    def __init__(self) -> None:
        self.rates: list[tuple[float, ...]] = []

    def on_optimizer_step_start(self, trainer: Trainer, **kwargs: Any) -> None:
        self.rates.append(tuple(float(group["lr"]) for group in trainer.optimizer.param_groups))


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    weight, bias = model.parameters()
    groups: list[dict[str, Any]] = [{"params": [weight]}, {"params": [bias], "lr": 0.02}]
    return torch.optim.SGD(groups, lr=0.1, momentum=0.9)


@pytest.mark.parametrize(
    ("create", "step_scheduler", "kind"),
    [
        (CosineLrScheduler.create_scheduler_fn(num_warmup_epochs=1), "update", Trainer),
        (LinearLrScheduler.create_scheduler_fn(), "epoch", Trainer),
        (WSDLrScheduler.create_scheduler_fn(num_warmup_epochs=1), "update", Trainer),
        (PER_EPOCH, "epoch", Trainer),
        (PER_EPOCH, "update", Trainer),
        (ONE_CYCLE, "update", Trainer),
        (lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)), "update", Trainer),
        (TIMM, "update", TrainerWithTimmScheduler),
        (TIMM_EPOCHS, "update", TrainerWithTimmScheduler),
    ],
)
def test_the_values_are_those_of_the_run(create: Any, step_scheduler: str, kind: type[Trainer]) -> None:
    model = nn.Linear(3, 2).double()
    optimizer = make_optimizer(model)
    groups = [{**group, "params": None} for group in optimizer.param_groups]
    values = scheduled_values(create, EPOCHS, UPDATES, optimizer=optimizer, step_scheduler=step_scheduler)
    assert [{**group, "params": None} for group in optimizer.param_groups] == groups

    watching = Watching()
    trainer = kind(model, nn.MSELoss(), optimizer, callbacks=[watching])
    arguments = {"create_scheduler_fn": create, "step_scheduler": step_scheduler}
    trainer.train(regression_data(4 * UPDATES), EPOCHS, per_device_batch_size=4, **arguments)
    assert watching.rates == values
    assert len(values) == EPOCHS * UPDATES

    trainer.train(regression_data(4 * UPDATES), EPOCHS, per_device_batch_size=4, **arguments)
    assert watching.rates == 2 * values, "a second run begins with the rates that the optimizer was given"


@pytest.mark.parametrize("create", [CosineLrScheduler.create_scheduler_fn(), one_cycle(), PER_EPOCH])
def test_a_rate_that_was_set_after_a_run_is_the_peak_of_the_next_also_after_a_run_that_failed(create: Any) -> None:
    class Failing(Watching):
        def on_train_epoch_end(self, trainer: Trainer, **kwargs: Any) -> None:
            if len(self.rates) == 2 * UPDATES:
                raise KeyError("in the second epoch")

    model, watching = nn.Linear(3, 2).double(), Failing()
    trainer = Trainer(model, nn.MSELoss(), make_optimizer(model), callbacks=[watching])

    def peak_of_a_run(num_epochs: int = EPOCHS) -> float:
        before = len(watching.rates)
        trainer.train(regression_data(4 * UPDATES), num_epochs, per_device_batch_size=4, create_scheduler_fn=create)
        return max(rate for rate, _ in watching.rates[before:])

    with pytest.raises(KeyError, match="second epoch"):
        peak_of_a_run()
    peak = peak_of_a_run()
    assert peak == pytest.approx(0.1, rel=0.1)
    trainer.optimizer.param_groups[0]["lr"] = 0.5
    trainer.evaluate(regression_data(4), per_device_batch_size=4)
    assert peak_of_a_run() == pytest.approx(5 * peak)
    assert peak_of_a_run() == pytest.approx(5 * peak)


def test_the_figure_has_a_curve_for_each_group_that_differs(tmp_path: Path) -> None:
    optimizer = make_optimizer(nn.Linear(3, 2))
    figure = plot_schedule(CosineLrScheduler.create_scheduler_fn(), 3, 10, optimizer=optimizer, path=tmp_path / "a.png")
    assert len(figure.axes[0].lines) == 2
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert len(plot_schedule(ONE_CYCLE, 3, 1).axes[0].lines) == 1


def test_other_fields_can_be_shown() -> None:
    optimizer = make_optimizer(nn.Linear(3, 2))
    values = scheduled_values(ONE_CYCLE, 2, 10, optimizer=optimizer, field="momentum")
    assert values[0][0] > min(value[0] for value in values)


def test_a_schedule_that_is_too_short_fails_here_and_not_in_the_run() -> None:
    with pytest.raises(ValueError, match="steps"):
        scheduled_values(functools.partial(lr_scheduler.OneCycleLR, max_lr=0.1, total_steps=10), 3, 10)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((PER_EPOCH, 0, 10), "`num_epochs` is 0"),
        ((PER_EPOCH, 3, 2.5), "`num_updates_per_epoch` is 2.5"),
        ((lr_scheduler.ReduceLROnPlateau, 3, 10), "follows a metric"),
    ],
)
def test_bad_input_is_an_error(arguments: Any, words: str) -> None:
    with pytest.raises((ArgumentTypeError, ConfigurationError), match=words):
        plot_schedule(*arguments)
