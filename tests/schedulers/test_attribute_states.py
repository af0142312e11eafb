"""States as pytorch-accelerated 0.1 saves them: a scheduler's attributes, with or without a counter.

The dicts are what its version 0.1.61 wrote after 24 updates; `tests/differential` compares with the real files.
"""

import warnings
from typing import Any

import pytest

from pytorch_accelerated.errors import InvalidCheckpointError
from pytorch_accelerated.schedulers.cosine_scheduler import CosineLrScheduler
from pytorch_accelerated.schedulers.scheduler_base import SchedulerBase, StatefulSchedulerBase
from pytorch_accelerated.schedulers.wsd_scheduler import WSDLrScheduler
from tests.schedulers.curves import an_optimizer, rates

COSINE: dict[str, Any] = {
    "total_iterations": 40,
    "lr_min_ratio": None,
    "lr_min": 1e-06,
    "warmup_iterations": 6,
    "warmup_lr_init": 1e-06,
    "warmup_lr_ratio": None,
    "k_decay": 1.0,
    "num_cooldown_iterations": 0,
    "num_updates": 23,
}
WSD: dict[str, Any] = {
    "param_group_field": "lr",
    "base_lr_values": [0.1],
    "total_steps": 40,
    "num_warmup_steps": 0,
    "decay_phase_ratio": 0.25,
    "lr_min": 1e-06,
    "warmup_starting_lr": 1e-06,
    "use_inverse_sqrt_decay": True,
    "num_checkpoints": 1,
    "checkpoint_steps": [40],
    "is_continuation_from_checkpoint": False,
    "previous_checkpoint_step": 17,
    "checkpoint_decay_info": [{"period_start": 0, "period_end": 40, "decay_steps": 10, "pre_decay_step": 30}],
}


def a_cosine(*lrs: float, **kwargs: Any) -> tuple[Any, CosineLrScheduler]:
    optimizer = an_optimizer(*lrs or (0.1,))
    arguments = {"total_num_epochs": 10, "num_update_steps_per_epoch": 4, "num_warmup_epochs": 1.5, **kwargs}
    return optimizer, CosineLrScheduler(optimizer, **arguments)


def test_a_state_with_the_same_settings_continues_the_curve_without_a_warning() -> None:
    whole = rates(*a_cosine(), 40)
    optimizer, scheduler = a_cosine()
    scheduler.load_state_dict(COSINE)
    assert scheduler.last_update == 23
    assert rates(optimizer, scheduler, 16) == pytest.approx(whole[24:], rel=1e-12)


def test_base_values_come_from_the_state() -> None:
    optimizer, scheduler = a_cosine(0.5, 0.5)
    scheduler.load_state_dict({**COSINE, "base_lr_values": [0.1, 0.2]})
    assert scheduler.base_lr_values == [0.1, 0.2]
    expected_optimizer, expected = a_cosine(0.1, 0.2)
    expected.step_update(24)
    assert [group["lr"] for group in optimizer.param_groups] == [
        group["lr"] for group in expected_optimizer.param_groups
    ]


def test_settings_that_differ_are_named_and_stay_those_of_the_run() -> None:
    whole = rates(*a_cosine(total_num_epochs=20), 80)
    optimizer, scheduler = a_cosine(total_num_epochs=20)
    with pytest.warns(
        UserWarning, match=r"CosineLrScheduler: .*are ignored: total_iterations=40 \(here 80\)\. Make it"
    ):
        scheduler.load_state_dict(COSINE)
    assert rates(optimizer, scheduler, 56) == pytest.approx(whole[24:], rel=1e-12)


def test_a_state_without_a_counter_warns_and_leaves_the_schedule_unchanged() -> None:
    optimizer = an_optimizer(0.3)
    scheduler = WSDLrScheduler(optimizer, total_steps=40, decay_phase_ratio=0.25)
    rates(optimizer, scheduler, 3)
    with pytest.warns(UserWarning, match=r"the number of finished updates.*scheduler.step_update") as caught:
        scheduler.load_state_dict(WSD)
    assert "are ignored" not in str(caught[0].message)
    assert scheduler.get_current_step() == 3
    assert scheduler.base_lr_values == [0.1]
    assert optimizer.param_groups[0]["lr"] == 0.1


def test_checkpoints_at_other_steps_are_named() -> None:
    scheduler = WSDLrScheduler(an_optimizer(), total_steps=40, num_checkpoints=2)
    with pytest.warns(
        UserWarning, match=r"decay_phase_ratio=0.25 \(here 0.1\), checkpoint_steps=\[10, 20\] \(here \[20, "
    ):
        scheduler.load_state_dict({**WSD, "num_checkpoints": 2, "checkpoint_steps": [10, 20]})


class Halving(StatefulSchedulerBase):
    """As a user writes it for 0.1, where both methods about states have to be defined."""

    def get_updated_values(self, num_updates: int) -> list[float]:
        return [value / 2**num_updates for value in self.base_lr_values]

    def state_dict(self) -> dict[str, Any]:
        return {"num_updates": self._num_updates}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._num_updates = state_dict["num_updates"]


def test_a_scheduler_with_its_own_methods_keeps_its_counter_where_0_1_has_it() -> None:
    whole = an_optimizer(0.8)
    expected = rates(whole, Halving(whole), 6)
    optimizer = an_optimizer(0.8)
    scheduler = Halving(optimizer)
    used = rates(optimizer, scheduler, 3)
    state = scheduler.state_dict()
    assert state == {"num_updates": 2}
    resumed = Halving(optimizer)
    resumed.load_state_dict(state)
    resumed.step_update(resumed._num_updates + 1)
    assert used + rates(optimizer, resumed, 3) == expected


class Inherited(StatefulSchedulerBase):
    """A user's own with a setting, which leaves its state to the base."""

    half = 0.5

    def get_updated_values(self, num_updates: int) -> list[float]:
        return [value * self.half**num_updates for value in self.base_lr_values]


def test_all_matching_attributes_of_a_custom_scheduler_are_loaded() -> None:
    state = {"param_group_field": "lr", "base_lr_values": [0.8], "_num_updates": 2, "half": 0.5}
    state["_initial_param_group_field"] = "initial_lr"
    optimizer = an_optimizer(0.1)
    scheduler = Inherited(optimizer)
    scheduler.load_state_dict(state)
    assert optimizer.param_groups[0]["lr"] == 0.1
    with pytest.warns(UserWarning, match=r"half=0.25 \(here 0.5\), other=1 \(it has none\)"):
        scheduler.load_state_dict({**state, "half": 0.25, "other": 1})


class Stateless(SchedulerBase):
    """A scheduler that gets the number of updates from outside."""

    def get_updated_values(self, num_updates: int) -> float:
        return 0.5


def test_a_scheduler_without_a_counter_loads_base_values() -> None:
    scheduler = Stateless(an_optimizer(0.4))
    scheduler.load_state_dict({"base_lr_values": [0.2], "_num_updates": 3})
    assert scheduler.base_lr_values == [0.2]


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({**COSINE, "num_updates": "23"}, "has '23' for the number of updates"),
        ({**COSINE, "num_updates": -2}, "has -2 for the number of updates"),
        ({**COSINE, "num_updates": True}, "has True for the number of updates"),
        ({**COSINE, "base_lr_values": 0.1}, "base_lr_values=0.1, but this must be a list"),
        ({**COSINE, "base_lr_values": ["0.1"]}, "must be a list with one number"),
        ({**COSINE, "base_lr_values": [0.1, 0.1]}, "state of 2 parameter groups"),
    ],
)
def test_a_state_that_makes_no_sense_is_refused_before_anything_is_changed(state: Any, message: str) -> None:
    optimizer, scheduler = a_cosine()
    before = scheduler.state_dict()
    with warnings.catch_warnings(), pytest.raises(InvalidCheckpointError, match=message):
        scheduler.load_state_dict(state)
    assert scheduler.state_dict() == before
    assert optimizer.param_groups[0]["initial_lr"] == 0.1
