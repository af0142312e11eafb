"""Optimizers and schedules by name are those of transformers."""

from typing import Any

import pytest
import torch
from torch import nn

from pytorch_accelerated.errors import ConfigurationError
from pytorch_accelerated.huggingface.optimizing import decay_parameter_names, make_schedule
from pytorch_accelerated.huggingface.strategies import SchedulerType

SCHEDULES = [
    ("linear", {}),
    ("cosine", {}),
    ("cosine", {"num_cycles": 1.5}),
    ("cosine_with_restarts", {"num_cycles": 3}),
    ("polynomial", {"power": 2.0, "lr_end": 0.01}),
    ("constant", {}),
    ("constant_with_warmup", {}),
    ("inverse_sqrt", {}),
    ("cosine_with_min_lr", {"min_lr": 0.02}),
    ("cosine_with_min_lr", {"min_lr_rate": 0.1}),
    ("warmup_stable_decay", {"num_decay_steps": 5}),
    ("warmup_stable_decay", {"num_decay_steps": 5, "warmup_type": "cosine", "decay_type": "linear"}),
    ("warmup_stable_decay", {"num_decay_steps": 5, "warmup_type": "1-sqrt"}),
    ("warmup_stable_decay", {"num_decay_steps": 4, "num_stable_steps": 2, "decay_type": "1-sqrt", "min_lr_ratio": 0.1}),
]


def rates(make) -> list[float]:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    schedule = make(optimizer)
    values = []
    for _ in range(14):  # beyond the end, too
        values.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return values


@pytest.mark.filterwarnings("ignore:Both num_training_steps and num_stable_steps")
@pytest.mark.parametrize(("kind", "arguments"), SCHEDULES)
@pytest.mark.parametrize("warmup", [0, 3])
def test_a_schedule_by_name_has_the_rates_of_transformers(kind: str, arguments: dict[str, Any], warmup: int) -> None:
    transformers = pytest.importorskip("transformers")
    ours = rates(
        lambda optimizer: make_schedule(
            kind, optimizer, num_warmup_steps=warmup, num_training_steps=12, arguments=arguments
        )
    )
    theirs = rates(
        lambda optimizer: transformers.get_scheduler(
            kind, optimizer, num_warmup_steps=warmup, num_training_steps=12, scheduler_specific_kwargs=arguments
        )
    )
    assert ours == pytest.approx(theirs, rel=1e-12, abs=1e-15)
    assert len(set(ours)) > 1 or kind.startswith("constant")


def test_every_kind_of_schedule_is_compared() -> None:
    assert {kind for kind, _ in SCHEDULES} == {kind.value for kind in SchedulerType} - {"reduce_lr_on_plateau"}


def test_arguments_that_a_schedule_does_not_take_are_refused_by_name() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    with pytest.raises(ConfigurationError, match=r"'linear' cannot be made .*'power'"):
        make_schedule("linear", optimizer, num_warmup_steps=0, num_training_steps=1, arguments={"power": 2})


def test_weight_decay_spares_biases_and_norms() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3)))
    assert decay_parameter_names(model) == ["0.weight", "2.0.weight"]
