"""Properties that all our schedulers have in common."""

import dataclasses
import functools
import json
from types import SimpleNamespace
from typing import Any

import pytest
from torch.optim import Optimizer

from pytorch_accelerated import TrainerPlaceholderValues as P
from pytorch_accelerated.errors import ConfigurationError
from pytorch_accelerated.run_config import TrainerRunConfig
from pytorch_accelerated.schedulers import (
    ConstantLrScheduler,
    CosineLrScheduler,
    InverseSqrtLrScheduler,
    LinearLrScheduler,
    PolynomialLrScheduler,
    WSDLrScheduler,
)
from pytorch_accelerated.trainer import replace_trainer_placeholder_values
from tests.schedulers.curves import an_optimizer, rates, train

WARMUP = 4
ALL: dict[str, Any] = {
    "cosine": functools.partial(CosineLrScheduler.create_scheduler_fn, k_decay=1.5, num_cooldown_epochs=0.25),
    "linear": functools.partial(LinearLrScheduler.create_scheduler_fn, min_lr_ratio=0.2),
    "polynomial": functools.partial(PolynomialLrScheduler.create_scheduler_fn, power=2),
    "constant": ConstantLrScheduler.create_scheduler_fn,
    "inverse square root": InverseSqrtLrScheduler.create_scheduler_fn,
    "wsd": functools.partial(WSDLrScheduler.create_scheduler_fn, lr_min=0.1, decay_phase_ratio=0.2),
}


def make(name: str, optimizer: Optimizer, num_epochs: int = 2, updates_per_epoch: int = 8, **kwargs: Any) -> Any:
    """The scheduler, as a trainer makes it in a run of that many epochs; the warmup is `WARMUP` updates."""
    fields: dict[str, Any] = dict.fromkeys(field.name for field in dataclasses.fields(TrainerRunConfig))
    facts = {"num_epochs": num_epochs, "num_update_steps_per_epoch": updates_per_epoch}
    trainer = SimpleNamespace(run_config=TrainerRunConfig(**{**fields, **facts}))
    create = ALL[name](**{"num_warmup_epochs": WARMUP / P.NUM_UPDATE_STEPS_PER_EPOCH, **kwargs})
    return replace_trainer_placeholder_values(trainer, create)(optimizer)


@pytest.fixture(params=list(ALL))
def name(request: pytest.FixtureRequest) -> str:
    value: str = request.param
    return value


def test_the_warmup_is_a_line_from_the_starting_rate_to_the_peak(name: str) -> None:
    optimizer = an_optimizer(0.8)
    used = rates(optimizer, make(name, optimizer, warmup_starting_lr=0.4), WARMUP + 1)
    assert used == pytest.approx([0.4, 0.5, 0.6, 0.7, 0.8])


@pytest.mark.parametrize(("num_epochs", "updates_per_epoch"), [(2, 8), (4, 5)])
def test_training_with_the_trainers_numbers_follows_the_curve_update_by_update(
    name: str, num_epochs: int, updates_per_epoch: int
) -> None:
    num_updates = num_epochs * updates_per_epoch
    optimizer = an_optimizer(0.8)
    scheduler = make(name, optimizer, num_epochs, updates_per_epoch)
    curve = [scheduler.get_updated_values(update)[0] for update in range(num_updates)]
    used = [rate for _ in range(num_epochs) for rate in rates(optimizer, scheduler, updates_per_epoch)]
    assert used == curve
    assert max(curve) == pytest.approx(0.8)
    assert curve.index(max(curve)) == WARMUP


def test_every_group_follows_the_curve_at_its_own_height(name: str) -> None:
    optimizer = an_optimizer(0.8, 0.08, 0.0)
    kwargs: dict[str, Any] = {"min_lr_ratio": 0.1} if name in ("cosine", "linear", "polynomial") else {}
    used = train(optimizer, make(name, optimizer, num_warmup_epochs=0, **kwargs), 16)
    assert [low for _, low, _ in used] == pytest.approx([high / 10 for high, _, _ in used])
    assert [frozen for *_, frozen in used] == [0.0] * 16


def test_a_group_that_is_frozen_by_a_rate_of_zero_stays_so_under_absolute_rates(name: str) -> None:
    optimizer = an_optimizer(0.8, 0.0)
    used = train(optimizer, make(name, optimizer, warmup_starting_lr=0.4), 20)
    assert [frozen for _, frozen in used] == [0.0] * 20


@pytest.mark.parametrize("stop_after", [0, 1, 3, 8, 15, 16])
def test_edge_12_a_resumed_curve_equals_the_uninterrupted_one(name: str, stop_after: int) -> None:
    whole_optimizer = an_optimizer(0.8, 0.1)
    whole = train(whole_optimizer, make(name, whole_optimizer), 18)

    optimizer = an_optimizer(0.8, 0.1)
    scheduler = make(name, optimizer)
    before = train(optimizer, scheduler, stop_after)
    state = json.loads(json.dumps(scheduler.state_dict()))
    resumed_optimizer = an_optimizer(0.8, 0.1)
    resumed = make(name, resumed_optimizer)
    resumed_optimizer.load_state_dict(optimizer.state_dict())
    resumed.load_state_dict(state)
    assert before + train(resumed_optimizer, resumed, 18 - stop_after) == whole


def test_the_factory_takes_the_arguments_of_the_constructor_in_its_order() -> None:
    cosine = CosineLrScheduler.create_scheduler_fn(3, 5, 2.0, num_cooldown_epochs=1)(an_optimizer())
    assert (cosine.total_updates, cosine.k_decay, cosine.num_cooldown_updates) == (15, 2.0, 5)
    wsd = WSDLrScheduler.create_scheduler_fn(3, 5, 1, 0.2, 0.1, num_checkpoints=2)(an_optimizer())
    assert (wsd.total_steps, wsd.num_warmup_updates, wsd.decay_phase_ratio, wsd.lr_min) == (15, 5, 0.2, 0.1)
    assert wsd.get_checkpoint_steps() == [7, 15]
    with pytest.raises(TypeError, match="too many positional arguments"):
        ConstantLrScheduler.create_scheduler_fn(1, 2, 3, 4, 5)


def test_a_placeholder_given_to_a_constructor_is_a_clear_error() -> None:
    with pytest.raises(TypeError, match=r"NUM_UPDATE_STEPS_PER_EPOCH has no value before a run starts"):
        CosineLrScheduler(an_optimizer(), 3, P.NUM_UPDATE_STEPS_PER_EPOCH)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("create", "message"),
    [
        (lambda: ConstantLrScheduler(an_optimizer(), 0), "num_update_steps_per_epoch=0 is not above 0"),
        (lambda: ConstantLrScheduler(an_optimizer(), 9, num_warmup_epochs=-1), "num_warmup_epochs=-1 is negative"),
        (lambda: ConstantLrScheduler(an_optimizer(), 9, warmup_starting_lr=-1), "warmup_starting_lr=-1 is negative"),
        (lambda: ConstantLrScheduler(an_optimizer(), 9, warmup_starting_lr_ratio=2), "starting_lr_ratio=2 is not a sh"),
        (lambda: LinearLrScheduler(an_optimizer(), 0, 9), "the run has 0"),
        (lambda: LinearLrScheduler(an_optimizer(), 3, 9, lr_min=float("nan")), "lr_min=nan is negative"),
        (lambda: LinearLrScheduler(an_optimizer(), 3, 9, min_lr_ratio=-1), "min_lr_ratio=-1 .*from 0 to 1"),
        (lambda: LinearLrScheduler(an_optimizer(), 3, 9, num_cooldown_epochs=-1), "num_cooldown_epochs=-1 is neg"),
        (
            lambda: LinearLrScheduler(an_optimizer(), 3, 9, num_warmup_epochs=2, num_cooldown_epochs=2),
            "together are 36 updates, and the run has 27",
        ),
        (lambda: PolynomialLrScheduler(an_optimizer(), 3, 9, power=0), "power=0 is not above 0"),
        (lambda: CosineLrScheduler(an_optimizer(), 3, 9, k_decay=0), "k_decay=0 is not above 0"),
    ],
)
def test_a_bad_argument_is_an_error_with_its_name_value_reason_and_remedy(create: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        create()
