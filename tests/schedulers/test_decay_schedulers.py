"""Cosine, line, power and inverse root, against timm, torch and points worked out by hand."""

import functools
from typing import Any

import pytest
from torch.optim.lr_scheduler import LinearLR, LRScheduler, PolynomialLR

from pytorch_accelerated.schedulers import (
    CosineLrScheduler,
    InverseSqrtLrScheduler,
    LinearLrScheduler,
    PolynomialLrScheduler,
)
from tests.schedulers.curves import an_optimizer, rates


def rates_of(scheduler: LRScheduler, num_updates: int) -> list[float]:
    """The rates of a torch scheduler, update by update."""
    used = []
    for _ in range(num_updates):
        used.append(scheduler.get_last_lr()[0])
        scheduler.optimizer.step()
        scheduler.step()
    return [float(rate) for rate in used]


@pytest.mark.parametrize("k_decay", [0.5, 1.0, 2.0])
@pytest.mark.parametrize(("warmup", "cooldown"), [(0, 0), (2, 0), (0, 3), (2, 3)])
def test_cosine_equals_timm(k_decay: float, warmup: int, cooldown: int) -> None:
    timm_scheduler = pytest.importorskip("timm.scheduler")
    theirs_optimizer = an_optimizer(0.8)
    theirs = timm_scheduler.CosineLRScheduler(
        theirs_optimizer,
        t_initial=(10 - warmup - cooldown) * 4,
        lr_min=0.01,
        warmup_t=warmup * 4,
        warmup_lr_init=0.05,
        warmup_prefix=True,
        t_in_epochs=False,
        k_decay=k_decay,
    )
    expected = []
    for update in range(44):
        theirs.step_update(update)
        expected.append(theirs_optimizer.param_groups[0]["lr"])
    optimizer = an_optimizer(0.8)
    ours = CosineLrScheduler(
        optimizer,
        total_num_epochs=10,
        num_update_steps_per_epoch=4,
        k_decay=k_decay,
        lr_min=0.01,
        num_warmup_epochs=warmup,
        warmup_starting_lr=0.05,
        num_cooldown_epochs=cooldown,
    )
    assert rates(optimizer, ours, 44) == pytest.approx(expected)


def test_edge_11_a_starting_ratio_does_not_overshoot_the_peak() -> None:
    optimizer = an_optimizer(0.8)
    scheduler = CosineLrScheduler(optimizer, 4, 4, num_warmup_epochs=1, warmup_starting_lr_ratio=0.5)
    assert rates(optimizer, scheduler, 5) == pytest.approx([0.4, 0.5, 0.6, 0.7, 0.8])
    assert max(rates(optimizer, scheduler, 11)) < 0.8


def test_a_fraction_of_an_epoch_of_warmup_is_rounded_to_updates() -> None:
    optimizer = an_optimizer(1.0)
    scheduler = LinearLrScheduler(optimizer, 1, 100, num_warmup_epochs=0.1 * 3)  # a little more than 0.3
    assert scheduler.num_warmup_updates == 30


@pytest.mark.parametrize(
    ("kind", "arguments", "of_torch"),
    [
        (LinearLrScheduler, {"min_lr_ratio": 0.25}, functools.partial(LinearLR, start_factor=1.0, end_factor=0.25)),
        (PolynomialLrScheduler, {"power": 2.0, "lr_min": 0.0}, functools.partial(PolynomialLR, power=2.0)),
    ],
)
def test_line_and_power_equal_torch(kind: Any, arguments: dict[str, float], of_torch: Any) -> None:
    optimizer = an_optimizer(0.8)
    expected = rates_of(of_torch(an_optimizer(0.8), total_iters=20), 24)
    assert rates(optimizer, kind(optimizer, 4, 5, **arguments), 24) == pytest.approx(expected)


def test_inverse_square_root_halves_whenever_the_time_is_four_times_as_long() -> None:
    optimizer = an_optimizer(0.8)
    used = rates(optimizer, InverseSqrtLrScheduler(optimizer, 2, num_warmup_epochs=2), 65)
    assert [used[update] for update in (4, 16, 64)] == pytest.approx([0.8, 0.4, 0.2])
