"""A schedule is as long as the run, also where `max_num_train_steps` ends the run within an epoch."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import nn
from torch.optim import SGD
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, OneCycleLR

from pytorch_accelerated import Trainer, TrainerPlaceholderValues
from pytorch_accelerated.callbacks import SaveTrainingStateCallback
from pytorch_accelerated.errors import ConfigurationError
from pytorch_accelerated.schedulers.cosine_scheduler import CosineLrScheduler
from pytorch_accelerated.schedulers.warmup_scheduler import LinearLrScheduler
from pytorch_accelerated.schedulers.wsd_scheduler import WSDLrScheduler
from pytorch_accelerated.trainer import TrainerWithTimmScheduler
from tests.support.recording import Rates
from tests.support.reference import regression_data

EPOCHS: Any = TrainerPlaceholderValues.NUM_EPOCHS
UPDATES: Any = TrainerPlaceholderValues.NUM_UPDATE_STEPS_PER_EPOCH
DATA = regression_data(20)
PEAK = 0.8
Factory = Callable[[Any], Any]


def an_optimizer(model: nn.Module | None = None) -> SGD:
    return SGD((model or nn.Linear(3, 2).double()).parameters(), lr=PEAK)


def rates_in_run(
    create: Factory, kind: type[Trainer] = Trainer, *callbacks: Any, num_epochs: int = 2, **arguments: Any
) -> list[float]:
    """The rate of each update of a run of five updates per epoch, and the one after the last."""
    rates = Rates()
    model = nn.Linear(3, 2).double()
    trainer = kind(model, nn.MSELoss(), an_optimizer(model), callbacks=[rates, *callbacks])
    trainer.train(DATA, num_epochs, create_scheduler_fn=create, **{"per_device_batch_size": 4, **arguments})
    return [*rates.used, float(trainer.optimizer.param_groups[0]["lr"])]


def rates_alone(create: Factory, num_updates: int, *, is_timm: bool = False) -> list[float]:
    """The same of a scheduler that is stepped by hand."""
    optimizer = an_optimizer()
    scheduler = create(optimizer)
    rates = [float(optimizer.param_groups[0]["lr"])]
    for update in range(num_updates):
        optimizer.step()
        scheduler.step_update(update + 1) if is_timm else scheduler.step()
        rates.append(float(optimizer.param_groups[0]["lr"]))
    return rates


def one_cycle(**length: Any) -> Factory:
    return functools.partial(OneCycleLR, max_lr=PEAK, **length)


OF_RUN: dict[str, tuple[Factory, Callable[[int], Factory]]] = {
    "cosine": (
        CosineLrScheduler.create_scheduler_fn(lr_min=0.01),
        lambda total: functools.partial(
            CosineLrScheduler, total_num_epochs=1, num_update_steps_per_epoch=total, lr_min=0.01
        ),
    ),
    "cosine told both": (
        functools.partial(CosineLrScheduler, total_num_epochs=EPOCHS, num_update_steps_per_epoch=UPDATES),
        lambda total: functools.partial(CosineLrScheduler, total_num_epochs=total, num_update_steps_per_epoch=1),
    ),
    "line with a warmup of a tenth of the run": (
        LinearLrScheduler.create_scheduler_fn(num_warmup_epochs=0.1 * EPOCHS),
        lambda total: functools.partial(
            LinearLrScheduler, total_num_epochs=total, num_update_steps_per_epoch=1, num_warmup_epochs=0.1 * total
        ),
    ),
    "wsd": (
        WSDLrScheduler.create_scheduler_fn(decay_phase_ratio=0.5),
        lambda total: functools.partial(WSDLrScheduler, total_steps=total, decay_phase_ratio=0.5),
    ),
    "wsd told both": (
        functools.partial(
            WSDLrScheduler,
            num_epochs=EPOCHS,
            num_update_steps_per_epoch=UPDATES,
            num_warmup_steps=EPOCHS * UPDATES // 3,
        ),
        lambda total: functools.partial(WSDLrScheduler, total_steps=total, num_warmup_steps=total // 3),
    ),
    "one cycle": (one_cycle(total_steps=EPOCHS * UPDATES), lambda total: one_cycle(total_steps=total)),
    "torch's cosine": (
        functools.partial(CosineAnnealingLR, T_max=UPDATES * EPOCHS),
        lambda total: functools.partial(CosineAnnealingLR, T_max=total),
    ),
}


@pytest.mark.parametrize("num_updates", [3, 7, 10, 13])  # within the only epoch, within the last one, whole, longer
@pytest.mark.parametrize("name", OF_RUN)
def test_a_schedule_is_as_long_as_the_run(name: str, num_updates: int) -> None:
    create, create_for = OF_RUN[name]
    used = rates_in_run(create, max_num_train_steps=num_updates)
    assert len(used) == num_updates + 1
    assert used == pytest.approx(rates_alone(create_for(num_updates), num_updates), rel=1e-12)


@pytest.mark.parametrize("num_updates", [3, 7, 10])
@pytest.mark.parametrize("per_epoch", [UPDATES, TrainerPlaceholderValues.TRAIN_DATALOADER_LEN])
def test_a_schedule_of_timm_is_as_long_as_the_run(per_epoch: Any, num_updates: int) -> None:
    timm_scheduler = pytest.importorskip("timm.scheduler")

    def cosine(total: Any) -> Factory:
        return functools.partial(timm_scheduler.CosineLRScheduler, t_initial=total, t_in_epochs=False, lr_min=0.01)

    used = rates_in_run(cosine(EPOCHS * per_epoch), TrainerWithTimmScheduler, max_num_train_steps=num_updates)
    assert used == rates_alone(cosine(num_updates), num_updates, is_timm=True)
    assert used[-1] == pytest.approx(0.01)


def test_a_schedule_of_timm_in_epochs_steps_when_an_epoch_is_over_which_one_that_a_limit_cuts_is_not() -> None:
    timm_scheduler = pytest.importorskip("timm.scheduler")
    create = functools.partial(timm_scheduler.CosineLRScheduler, t_initial=EPOCHS, lr_min=0.01)
    used = rates_in_run(create, TrainerWithTimmScheduler, max_num_train_steps=15)
    assert used[-1] == pytest.approx(0.01)
    cut = rates_in_run(create, TrainerWithTimmScheduler, max_num_train_steps=12)
    assert cut == [*used[:12], used[11]]


@pytest.mark.parametrize("per_epoch", [UPDATES, TrainerPlaceholderValues.TRAIN_DATALOADER_LEN])
def test_one_cycle_of_whole_epochs_is_refused_where_the_run_ends_within_one(per_epoch: Any) -> None:
    create = one_cycle(epochs=EPOCHS, steps_per_epoch=per_epoch)
    with pytest.raises(ConfigurationError, match=r"7 updates of 5 per.*`total_steps=NUM_EPOCHS \* NUM_UPDATE"):
        rates_in_run(create, max_num_train_steps=7)
    assert rates_in_run(create, max_num_train_steps=10) == rates_in_run(one_cycle(total_steps=10))


def test_a_scheduler_gets_plain_numbers_and_can_be_saved(tmp_path: Path) -> None:
    model = nn.Linear(3, 2).double()
    trainer = Trainer(model, nn.MSELoss(), an_optimizer(model), callbacks=[SaveTrainingStateCallback(tmp_path)])
    create = functools.partial(Keeping, epochs=EPOCHS, steps=UPDATES, total=EPOCHS * UPDATES)
    trainer.train(DATA, 2, per_device_batch_size=4, max_num_train_steps=7, create_scheduler_fn=create)
    assert trainer.scheduler.given == (2, 5, 7)
    assert set(map(type, trainer.scheduler.given)) == {int}
    trainer.save_checkpoint(tmp_path / "model.pt")


class Keeping(LambdaLR):
    """A user's scheduler that stores its arguments."""

    def __init__(self, optimizer: Any, epochs: int, steps: int, total: int) -> None:
        self.given = epochs, steps, total
        super().__init__(optimizer, lambda update: 1.0)
