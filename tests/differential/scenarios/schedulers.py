"""Schedulers, called by hand over a grid of their arguments."""

import itertools
from typing import Any

import torch

from pytorch_accelerated.schedulers import CosineLrScheduler, SchedulerBase, StatefulSchedulerBase, WSDLrScheduler
from tests.differential.scenarios.common import attempt, grid

RATES = (0.1, 0.02)


def _optimizer(**settings: Any) -> torch.optim.Optimizer:
    groups = [{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": rate} for rate in RATES]
    return torch.optim.SGD(groups, momentum=0.9, **settings)


def _values(optimizer: torch.optim.Optimizer, field: str = "lr") -> list[float]:
    return [group[field] for group in optimizer.param_groups]


def _rates(scheduler: Any, optimizer: torch.optim.Optimizer, steps: int, field: str = "lr") -> Any:
    """The values that each number of updates gives."""
    seen = {"at first": _values(optimizer, field)}
    for step in range(steps + 1):
        scheduler.step_update(step)
        seen[str(step)] = _values(optimizer, field)
    return seen


def _steps(scheduler: Any, optimizer: torch.optim.Optimizer, steps: int) -> Any:
    """The values after each call of `step`."""
    seen = []
    for _ in range(steps):
        scheduler.step()
        seen.append(_values(optimizer)[0])
    return seen


def _attributes(scheduler: Any) -> Any:
    return {
        name: attempt(lambda name=name: getattr(scheduler, name)) for name in ("base_lr_values", "param_group_field")
    }


COSINE = {
    "defaults": {},
    "k_decay": {"k_decay": 1.5},
    "lr_min": {"lr_min": 1e-3},
    "min_lr_ratio": {"min_lr_ratio": 0.1},
    "warmup": {"num_warmup_epochs": 1},
    "warmup of a part of an epoch": {"num_warmup_epochs": 0.5},
    "warmup from a rate": {"num_warmup_epochs": 1, "warmup_starting_lr": 1e-3},
    "warmup from a share": {"num_warmup_epochs": 1, "warmup_starting_lr_ratio": 0.1},
    "cooldown": {"num_cooldown_epochs": 1},
    "warmup and cooldown": {"num_warmup_epochs": 1, "num_cooldown_epochs": 1, "lr_min": 1e-4},
    "all": {
        "k_decay": 0.7,
        "min_lr_ratio": 0.05,
        "num_warmup_epochs": 1,
        "warmup_starting_lr_ratio": 0.2,
        "num_cooldown_epochs": 1,
    },
}


def cosine() -> Any:
    def run(**arguments: Any) -> Any:
        optimizer = _optimizer()
        scheduler = CosineLrScheduler(optimizer, 4, 5, **arguments)
        return {"rates": _rates(scheduler, optimizer, 24), **_attributes(scheduler)}

    return grid(run, COSINE)


WSD_LENGTHS = {
    "epochs": {"num_epochs": 4, "num_update_steps_per_epoch": 25},
    "steps": {"total_steps": 100},
    "few steps": {"total_steps": 12},
}
WSD = {
    "defaults": {},
    "warmup": {"num_warmup_steps": 10},
    "warmup of 1 %": {"num_warmup_steps": None},
    "warmup from a rate": {"num_warmup_steps": 5, "warmup_starting_lr": 1e-3},
    "longer decay": {"decay_phase_ratio": 0.3},
    "higher minimum": {"lr_min": 0.1},
    "inverse proportional": {"use_inverse_sqrt_decay": False, "lr_min": 0.1},
    "two checkpoints": {"num_checkpoints": 2},
    "three checkpoints": {"num_checkpoints": 3, "num_warmup_steps": 5},
    "continuation": {"is_continuation_from_checkpoint": True},
}


def wsd() -> Any:
    def run(**arguments: Any) -> Any:
        optimizer = _optimizer()
        scheduler = WSDLrScheduler(optimizer, **arguments)
        return {
            "rates": _rates(scheduler, optimizer, 101),
            "checkpoint steps": attempt(scheduler.get_checkpoint_steps),
            "decay info": attempt(scheduler.get_decay_info),
            "current step": attempt(scheduler.get_current_step),
            **_attributes(scheduler),
        }

    cases = itertools.product(WSD_LENGTHS.items(), WSD.items())
    return grid(run, {f"{length}, {name}": {**first, **rest} for (length, first), (name, rest) in cases})


class _Halving(StatefulSchedulerBase):
    def get_updated_values(self, num_updates: int) -> Any:
        return [value * 0.5**num_updates for value in RATES]


class _Counting(StatefulSchedulerBase):
    """With the two methods that are abstract in the reference."""

    def get_updated_values(self, num_updates: int) -> Any:
        return [value * 0.5**num_updates for value in RATES]

    def state_dict(self) -> Any:
        return {"count": 3}

    def load_state_dict(self, state: Any) -> None:
        self.loaded = state


class _OneNumber(_Counting):
    def get_updated_values(self, num_updates: int) -> Any:
        return 0.01 * (1 + num_updates)


class _Nothing(_Counting):
    def get_updated_values(self, num_updates: int) -> Any:
        return None


_MADE: dict[str, Any] = {
    "halving": _Counting,
    "cosine": lambda optimizer: CosineLrScheduler(optimizer, 4, 5, num_warmup_epochs=1),
    "wsd": lambda optimizer: WSDLrScheduler(optimizer, total_steps=20, num_warmup_steps=3),
}


class _Stateless(SchedulerBase):
    def get_updated_values(self, num_updates: int) -> Any:
        return [value * 0.5**num_updates for value in RATES]


def subclasses() -> Any:
    seen = {}
    for scheduler_type in (_Halving, _OneNumber, _Nothing, _Counting, _Stateless):
        optimizer = _optimizer()

        def run(scheduler_type: Any = scheduler_type, optimizer: Any = optimizer) -> Any:
            scheduler = scheduler_type(optimizer)
            return {"rates": _rates(scheduler, optimizer, 4), **_attributes(scheduler)}

        seen[scheduler_type.__name__] = attempt(run)
    return seen


def other_fields() -> Any:
    optimizer = _optimizer()
    scheduler = _Counting(optimizer, param_group_field="momentum")
    seen = {"momentum": _rates(scheduler, optimizer, 3, "momentum"), **_attributes(scheduler)}
    return {**seen, "absent": attempt(lambda: _Counting(_optimizer(), param_group_field="no_such_field"))}


def states() -> Any:
    """A scheduler goes on from the state of another of its kind."""
    seen = {}
    for name, make in _MADE.items():
        first = make(_optimizer())
        for _ in range(4):
            first.step()
        optimizer = _optimizer()
        second = make(optimizer)
        second.load_state_dict(first.state_dict())
        seen[name] = {"rates": _steps(second, optimizer, 4), "keys": sorted(first.state_dict())}
    return seen


def bad_arguments() -> Any:
    def make(**arguments: Any) -> Any:
        return type(WSDLrScheduler(_optimizer(), **arguments)).__name__

    seen = grid(
        make,
        {
            "wsd without a length": {},
            "wsd with epochs alone": {"num_epochs": 3},
            "wsd with both lengths": {"total_steps": 10, "num_epochs": 2, "num_update_steps_per_epoch": 5},
            "wsd with a warmup longer than the run": {"total_steps": 10, "num_warmup_steps": 20},
            "wsd without checkpoints": {"total_steps": 10, "num_checkpoints": 0},
            "wsd with a ratio above one": {"total_steps": 10, "decay_phase_ratio": 1.5},
        },
    )
    seen["cosine without epochs"] = attempt(lambda: type(CosineLrScheduler(_optimizer(), 0, 5)).__name__)
    return seen
