"""The base classes: when values are set, where they come from, and what is saved."""

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch.optim import Adam

from pytorch_accelerated.errors import ConfigurationError, HookOutputError, InvalidCheckpointError
from pytorch_accelerated.schedulers.cosine_scheduler import CosineLrScheduler
from pytorch_accelerated.schedulers.scheduler_base import SchedulerBase, StatefulSchedulerBase
from tests.schedulers.curves import a_weight, an_optimizer, rates, train


class Halving(StatefulSchedulerBase):
    """Update u has the initial value, halved u times."""

    def get_updated_values(self, num_updates: int) -> list[float]:
        return [value / 2**num_updates for value in self.base_lr_values]


class Milestones(StatefulSchedulerBase):
    """As users write it: what the values need is set after the base has been constructed."""

    def __init__(self, optimizer: torch.optim.Optimizer, milestones: dict[int, Any]) -> None:
        super().__init__(optimizer)
        self.milestones = milestones

    def get_updated_values(self, num_updates: int) -> None | float | Sequence[float]:
        value: None | float | Sequence[float] = self.milestones.get(num_updates)
        return value


class LateMilestones(Milestones):
    """A subclass of a subclass, whose constructor changes what its parent has set."""

    def __init__(self, optimizer: torch.optim.Optimizer, milestones: dict[int, Any], delay: int) -> None:
        super().__init__(optimizer, {})
        self.milestones = {update + delay: value for update, value in milestones.items()}


class Stateless(SchedulerBase):
    def get_updated_values(self, num_updates: int) -> float:
        return 0.5 - 0.1 * num_updates


def test_values_of_update_zero_are_set_by_the_constructor_also_of_a_subclass_that_finishes_later() -> None:
    optimizer = an_optimizer(0.1)
    assert rates(optimizer, Milestones(optimizer, {0: 0.5, 2: 0.25}), 4) == [0.5, 0.5, 0.25, 0.25]
    optimizer = an_optimizer(0.1)
    assert rates(optimizer, LateMilestones(optimizer, {0: 0.5}, delay=1), 3) == [0.1, 0.5, 0.5]


def test_the_counter_counts_finished_updates_and_follows_step_update() -> None:
    optimizer = an_optimizer(0.8)
    scheduler = Halving(optimizer)
    assert scheduler.last_update == -1
    scheduler.step_update(2)
    assert scheduler.last_update == 1
    assert rates(optimizer, scheduler, 2) == [0.2, 0.1]
    assert scheduler.last_update == 3


def test_a_scheduler_without_a_counter_gets_the_number_of_updates() -> None:
    optimizer = an_optimizer(0.1, 0.2)
    scheduler = Stateless(optimizer)
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.5]
    scheduler.step_update(3)
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.2, 0.2])
    restored = Stateless(other := an_optimizer(0.1, 0.2))
    restored.load_state_dict(scheduler.state_dict())
    assert [group["lr"] for group in other.param_groups] == [group["lr"] for group in optimizer.param_groups]


def test_a_wrong_number_of_values_is_an_error_that_counts_them() -> None:
    optimizer = an_optimizer(0.1, 0.2)
    with pytest.raises(HookOutputError, match=r"Milestones.get_updated_values returned 3 values.*2 parameter groups"):
        Milestones(optimizer, {0: [1, 2, 3]})


def test_a_field_that_does_not_exist_is_an_error_that_names_those_that_do() -> None:
    with pytest.raises(ConfigurationError, match=r"param_group_field='momentun'.*dampening.*momentum.*weight_decay"):
        Halving(an_optimizer(), "momentun")


def test_a_new_scheduler_on_a_used_or_resumed_optimizer_starts_from_the_initial_value() -> None:
    optimizer = an_optimizer(0.8)
    train(optimizer, Halving(optimizer), 3)
    resumed = an_optimizer(0.5)
    resumed.load_state_dict(optimizer.state_dict())
    for each in (optimizer, resumed):
        assert rates(each, Halving(each), 2) == [0.8, 0.4]


def test_a_group_added_later_is_scheduled_from_the_value_it_was_added_with() -> None:
    optimizer = an_optimizer(0.8)
    scheduler = Halving(optimizer)
    train(optimizer, scheduler, 1)
    optimizer.add_param_group({"params": [a_weight()], "lr": 0.16})
    assert scheduler.base_lr_values == [0.8, 0.16]
    assert train(optimizer, scheduler, 2) == [[0.4, 0.16], [0.2, 0.04]]


def test_a_tensor_is_filled_in_place() -> None:
    rate = torch.tensor(0.8)
    optimizer = Adam([a_weight()], lr=rate)
    scheduler = Halving(optimizer)
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] is rate
    assert rate.item() == pytest.approx(0.4)
    assert json.loads(json.dumps(scheduler.state_dict())) == {
        "values": [rate.item()],
        "base_values": pytest.approx([0.8]),
        "last_update": 0,
    }


def test_groups_that_share_the_default_tensor_get_values_of_their_own() -> None:
    optimizer = Adam([{"params": [a_weight()]}, {"params": [a_weight()]}], lr=torch.tensor(0.8))
    scheduler = Milestones(optimizer, {0: [0.5, 0.25]})
    assert [group["lr"].item() for group in optimizer.param_groups] == [0.5, 0.25]
    # The optimizer's default is the tensor of the first group, whose value is not the initial one any more.
    optimizer.add_param_group({"params": [a_weight()]})
    scheduler.milestones[1] = [0.125, 0.25, 0.5]
    scheduler.step()
    assert [group["lr"].item() for group in optimizer.param_groups] == [0.125, 0.25, 0.5]
    assert scheduler.base_lr_values == pytest.approx([0.8, 0.8, 0.8])


def test_the_initial_value_that_a_torch_scheduler_left_is_used() -> None:
    optimizer = Adam([a_weight()], lr=torch.tensor(0.8))
    torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.5)
    scheduler = Halving(optimizer)
    assert scheduler.base_lr_values == pytest.approx([0.8])
    assert optimizer.param_groups[0]["lr"].item() == pytest.approx(0.8)
    assert isinstance(optimizer.param_groups[0]["initial_lr"], float), "a tensor would be read by the host in each step"


def test_a_state_of_another_kind_of_scheduler_is_refused() -> None:
    optimizer = an_optimizer()
    state = torch.optim.lr_scheduler.StepLR(optimizer, 1).state_dict()
    with pytest.raises(InvalidCheckpointError, match=r"Halving.*'last_epoch'.*but not.*'last_update'"):
        Halving(optimizer).load_state_dict(state)


def test_a_state_of_other_groups_is_refused_and_changes_nothing() -> None:
    state = Halving(an_optimizer(0.1, 0.2, 0.3)).state_dict()
    optimizer = an_optimizer(0.8, 0.4)
    scheduler = Halving(optimizer)
    with pytest.raises(InvalidCheckpointError, match=r"state of 3 parameter groups.*the optimizer has 2"):
        scheduler.load_state_dict(state)
    assert train(optimizer, scheduler, 1) == [[0.8, 0.4]]


# States as pytorch-accelerated 0.1 saves them: a scheduler's attributes, with or without a counter. tests/differential
# compares with the real files.


def a_cosine(*lrs: float) -> tuple[Any, CosineLrScheduler]:
    optimizer = an_optimizer(*lrs)
    return optimizer, CosineLrScheduler(optimizer, 10, 4, num_warmup_epochs=1.5)


def test_a_state_of_0_1_continues_the_curve_with_its_base_values_and_the_settings_of_here() -> None:
    whole = train(*a_cosine(0.1, 0.2), 40)
    optimizer, scheduler = a_cosine(0.5, 0.5)
    scheduler.load_state_dict({"lr_min": 1e-06, "k_decay": 2.0, "num_updates": 23, "base_lr_values": [0.1, 0.2]})
    assert scheduler.last_update == 23
    assert np.allclose(train(optimizer, scheduler, 16), whole[24:], rtol=1e-12)


def test_a_state_of_0_1_without_a_counter_warns_and_leaves_the_schedule_unchanged() -> None:
    optimizer, scheduler = a_cosine(0.3)
    rates(optimizer, scheduler, 3)
    with pytest.warns(UserWarning, match=r"the number of finished updates.*scheduler.step_update"):
        scheduler.load_state_dict({"base_lr_values": [0.1], "total_steps": 40})
    assert scheduler.last_update == 2
    assert scheduler.base_lr_values == [0.1]
    stateless = Stateless(an_optimizer(0.4))
    stateless.load_state_dict({"base_lr_values": [0.2], "_num_updates": 3})
    assert stateless.base_lr_values == [0.2]
    with pytest.raises(InvalidCheckpointError, match="state of 2 parameter groups"):
        scheduler.load_state_dict({"base_lr_values": [0.1, 0.1], "num_updates": 3})
