"""Warmup, stable, decay: the phases, the checkpoints and the curve."""

from typing import Any

import pytest

from pytorch_accelerated.errors import ConfigurationError
from pytorch_accelerated.schedulers import WSDLrScheduler, estimate_checkpoint_steps
from tests.schedulers.curves import an_optimizer, rates


def test_checkpoints_are_twice_as_far_as_the_ones_before() -> None:
    assert estimate_checkpoint_steps(100_000, 2) == [50_000, 100_000]
    assert estimate_checkpoint_steps(200_000) == [50_000, 100_000, 200_000]
    assert estimate_checkpoint_steps(200_000, 4) == [25_000, 50_000, 100_000, 200_000]
    assert estimate_checkpoint_steps(101, 3) == [25, 50, 101]
    assert estimate_checkpoint_steps(7, 1) == [7]


def test_a_decay_takes_its_share_of_the_updates_since_the_checkpoint_before() -> None:
    scheduler = WSDLrScheduler(an_optimizer(), total_steps=100, num_warmup_steps=5, num_checkpoints=3)
    assert scheduler.get_checkpoint_steps() == [25, 50, 100]
    assert scheduler.get_decay_info() == [
        {"period_start": 0, "period_end": 25, "decay_steps": 2, "pre_decay_step": 23},
        {"period_start": 25, "period_end": 50, "decay_steps": 2, "pre_decay_step": 48},
        {"period_start": 50, "period_end": 100, "decay_steps": 5, "pre_decay_step": 95},
    ]


def test_the_model_of_the_first_checkpoint_is_that_of_a_run_which_ends_there() -> None:
    short, long = an_optimizer(), an_optimizer()
    one = WSDLrScheduler(short, total_steps=40, num_warmup_steps=3, lr_min=0.1)
    several = WSDLrScheduler(long, total_steps=80, num_warmup_steps=3, lr_min=0.1, num_checkpoints=2)
    assert rates(short, one, 40) == rates(long, several, 40)


def test_the_rate_returns_to_the_peak_after_a_checkpoint_and_stays_at_the_minimum_after_the_last() -> None:
    optimizer = an_optimizer(0.8)
    scheduler = WSDLrScheduler(optimizer, total_steps=40, decay_phase_ratio=0.2, lr_min=0.1, num_checkpoints=2)
    used = rates(optimizer, scheduler, 43)
    assert used[19] < 0.3
    assert used[20:32] == pytest.approx([0.8] * 12)
    assert used[40:] == pytest.approx([0.08] * 3)


def test_the_current_step_counts_finished_updates_and_the_current_phase_is_theirs() -> None:
    scheduler = WSDLrScheduler(an_optimizer(), total_steps=10, num_checkpoints=2)
    seen = []
    for _ in range(11):
        seen.append((scheduler.get_current_step(), scheduler.get_current_phase_info()["period_end"]))
        scheduler.step()
    assert seen == list(enumerate([5] * 6 + [10] * 5))


def test_a_continuation_starts_at_the_peak() -> None:
    optimizer = an_optimizer(0.8)
    scheduler = WSDLrScheduler(optimizer, total_steps=20, num_warmup_steps=10, is_continuation_from_checkpoint=True)
    assert rates(optimizer, scheduler, 18) == [0.8] * 18


@pytest.mark.parametrize("updates", [18, 20, 25])
def test_a_continuation_with_a_loaded_position_starts_a_fresh_stable_phase(updates: int) -> None:
    optimizer = an_optimizer(0.8)
    short = WSDLrScheduler(optimizer, total_steps=20, num_warmup_steps=4, lr_min=0.1)
    rates(optimizer, short, updates)
    other = an_optimizer(0.1)
    continued = WSDLrScheduler(other, total_steps=10, lr_min=0.1, is_continuation_from_checkpoint=True)
    continued.load_state_dict(short.state_dict())
    fresh = an_optimizer(0.8)
    assert rates(other, continued, 10) == rates(fresh, WSDLrScheduler(fresh, total_steps=10, lr_min=0.1), 10)


def warmup_updates(**kwargs: Any) -> int:
    """The warmup of a run of 10 epochs of 20 updates."""
    return WSDLrScheduler.create_scheduler_fn(10, 20, **kwargs)(an_optimizer()).num_warmup_updates


def test_edge_12_a_warmup_of_none_is_one_percent_of_the_run() -> None:
    assert warmup_updates() == 2
    assert warmup_updates(num_warmup_epochs=0) == 0
    assert warmup_updates(num_warmup_epochs=1.5) == 30
    assert warmup_updates(is_continuation_from_checkpoint=True) == 0
    assert WSDLrScheduler.create_scheduler_fn(5, 50)(an_optimizer()).num_warmup_updates == 2
    assert WSDLrScheduler(an_optimizer(), total_steps=399, num_warmup_steps=None).num_warmup_updates == 3


def test_edge_12_a_decay_ratio_of_zero_means_no_decay() -> None:
    optimizer = an_optimizer(0.8)
    scheduler = WSDLrScheduler(optimizer, total_steps=8, decay_phase_ratio=0, num_checkpoints=2)
    assert rates(optimizer, scheduler, 10) == [0.8] * 10
    assert [period["decay_steps"] for period in scheduler.get_decay_info()] == [0, 0]


def test_a_run_too_short_for_a_decay_ends_at_the_minimum_all_the_same() -> None:
    optimizer = an_optimizer(0.8)
    scheduler = WSDLrScheduler(optimizer, total_steps=2, lr_min=0.1)
    assert scheduler.get_decay_info()[0]["decay_steps"] == 0
    assert rates(optimizer, scheduler, 3) == pytest.approx([0.8, 0.8, 0.08])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "needs num_epochs and num_update_steps_per_epoch, or"),
        ({"num_epochs": 3}, "needs num_epochs"),
        ({"total_steps": 10, "num_warmup_steps": -1}, "num_warmup_steps=-1 is negative"),
        ({"total_steps": 10, "decay_phase_ratio": 1.5}, r"decay_phase_ratio=1.5 .*from 0 to 1"),
        ({"total_steps": 10, "lr_min": 0, "use_inverse_sqrt_decay": False}, "lr_min=0 is not above 0"),
        ({"total_steps": 10, "lr_min": 2, "use_inverse_sqrt_decay": False}, r"lr_min=2 .*from 0 to 1"),
        ({"total_steps": 10, "num_warmup_steps": 10}, "num_warmup_steps=10.*step 10, would start at 9.*Shorten"),
        ({"total_steps": 40, "num_warmup_steps": 10, "num_checkpoints": 3}, "would start at 9"),
        ({"total_steps": 10, "num_checkpoints": 0}, r"num_checkpoints=0 .*at least 1"),
        ({"total_steps": 3, "num_checkpoints": 3}, r"num_checkpoints=3 .*total_steps=3.*fewer"),
    ],
)
def test_a_bad_argument_is_an_error_with_its_name_value_reason_and_remedy(arguments: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        WSDLrScheduler(an_optimizer(), **arguments)
