"""What the state of an optimizer of torch's looks like: by making one like it for a tiny parameter, and looking."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from pytorch_accelerated.checkpointing.likeness import misfit

# These want closures or sparse gradients, or have their state in one place for all parameters.
_WITH_OTHER_STEPS = ("LBFGS", "SparseAdam")
_HOW_IT_IS_COMPUTED = ("foreach", "fused", "capturable", "differentiable")
RATES = {"lr", "initial_lr", "max_lr", "min_lr", "swa_lr", "base_momentum", "max_momentum"}
"""The learning rate, and what schedulers leave in groups."""
_SIZE = 2  # of each dimension of the tiny parameter


def problem_of_entries(optimizer: Any, state: Mapping[str, Any]) -> str | None:
    """What keeps the next step of `optimizer` from going on from `state`, if anything does.

    torch takes over whatever stands there for a parameter, and finds out in the next step, when everything else has
    been changed. Of optimizers of others nobody knows what they need.

    Args:
        optimizer: the live one.
        state: with groups and entries of the usual kind, and the groups of `optimizer`.
    """
    inner = getattr(optimizer, "optimizer", optimizer)
    entries = state.get("state", {})
    for index, (live, saved) in enumerate(zip(inner.param_groups, state["param_groups"], strict=True)):
        path = f"param_groups[{index}]"
        problem = misfit(_settings(live), _settings(saved, live), path) or _misfit_of_how(saved, path)
        if problem is not None:
            return problem
    if not type(inner).__module__.startswith("torch.optim") or type(inner).__name__ in _WITH_OTHER_STEPS:
        return None
    known = {number for group in state["param_groups"] for number in group["params"]}
    if any(number not in known for number in entries):
        return "it has entries for parameters that are in none of its groups"
    for index, (live, saved) in enumerate(zip(inner.param_groups, state["param_groups"], strict=True)):
        usual_of = functools.cache(functools.partial(_usual_entry, inner, index, _Settings(saved)))
        for number, parameter in zip(saved["params"], live["params"], strict=True):
            entry = entries.get(number)
            if not entry or nn.parameter.is_lazy(parameter):
                continue
            try:
                usual = usual_of(parameter.ndim, parameter.dtype)
            except (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError) as error:
                return f"nothing can be computed with the settings of its groups ({type(error).__name__}: {error})"
            problem = None if usual is None else _problem_of_entry(entry, usual, parameter)
            if problem is not None:
                return f"what it has for parameter {number} cannot be gone on from: {problem}"
    return None


def _misfit_of_how(group: Mapping[str, Any], path: str) -> str | None:
    odd = [name for name in _HOW_IT_IS_COMPUTED if type(group.get(name)) not in (bool, type(None))]
    return f"{path}.{odd[0]} is a {type(group[odd[0]]).__name__}, not a bool" if odd else None


def _settings(group: Mapping[str, Any], live: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The settings of a group that are plain, without those that are None, which may be left open."""
    return {
        name: value
        for name, value in group.items()
        if name not in ("params", *_HOW_IT_IS_COMPUTED) and not callable(value)
        if live is None or value is not None or name in RATES
    }


class _Settings:
    """The settings of a saved group, which are compared by identity: nothing changes them meanwhile."""

    def __init__(self, group: Mapping[str, Any]) -> None:
        self.values = {name: value for name, value in group.items() if name not in ("params", *_HOW_IT_IS_COMPUTED)}


def _usual_entry(
    optimizer: torch.optim.Optimizer, index: int, saved: _Settings, dimensions: int, dtype: torch.dtype
) -> dict[str, Any] | None:
    """What such an optimizer has for a parameter after a step with saved settings; None if nobody can tell.

    Raises whatever the step does, if it works with the settings that there are now.
    """
    try:
        _entry_after_step(optimizer, _Settings(optimizer.param_groups[index]), dimensions, dtype)
    except Exception:  # one that needs arguments, or cannot compute with this dtype on the CPU
        return None
    return _entry_after_step(optimizer, saved, dimensions, dtype)


def _entry_after_step(
    optimizer: torch.optim.Optimizer, settings: _Settings, dimensions: int, dtype: torch.dtype
) -> dict[str, Any]:
    parameter = nn.Parameter(torch.zeros((_SIZE,) * dimensions, dtype=dtype, device="cpu"))
    parameter.grad = torch.zeros_like(parameter)
    probe: Any = type(optimizer)([{"params": [parameter]}])  # type: ignore[call-arg]
    group = {name: value for name, value in settings.values.items() if not isinstance(value, torch.Tensor)}
    if "lr" in settings.values:
        group["lr"] = float(settings.values["lr"])
    group.update({name: False for name in _HOW_IT_IS_COMPUTED if name in probe.defaults})
    probe.load_state_dict({"state": {}, "param_groups": [{**group, "params": [0]}]})
    probe.step()
    return dict(probe.state[parameter])


def _problem_of_entry(entry: Any, usual: Mapping[str, Any], parameter: torch.Tensor) -> str | None:
    if not isinstance(entry, Mapping):
        return f"it is a {type(entry).__name__}"
    # SGD has None in place of momentum before it has any.
    missing = sorted(
        str(name)
        for name, value in usual.items()
        if value is not None and entry.get(name) is None and not (name == "momentum_buffer" and name in entry)
    )
    if missing:
        return f"it has no {', '.join(missing)}"
    for name, value in usual.items():
        saved = entry.get(name)
        if isinstance(value, torch.Tensor) and saved is not None:
            problem = _problem_of_tensor(saved, value, parameter)
            if problem is not None:
                return f"{name} {problem}"
    return None


def _problem_of_tensor(saved: Any, usual: torch.Tensor, parameter: torch.Tensor) -> str | None:
    if not usual.ndim:  # a count: a number in states of older versions
        is_count = (isinstance(saved, torch.Tensor) and saved.numel() == 1) or isinstance(saved, (int, float))
        return None if is_count else f"is a {type(saved).__name__} in place of a number"
    if not isinstance(saved, torch.Tensor):
        return f"is a {type(saved).__name__} in place of a tensor"
    is_of_parameter = usual.shape == (_SIZE,) * parameter.ndim
    if is_of_parameter and saved.shape != parameter.shape:
        return f"has the shape {tuple(saved.shape)}, and the parameter {tuple(parameter.shape)}"
    if saved.ndim != usual.ndim or saved.is_floating_point() != usual.is_floating_point():
        return f"has {saved.ndim} dimensions of {saved.dtype}, not {usual.ndim} of {usual.dtype}"
    return None
