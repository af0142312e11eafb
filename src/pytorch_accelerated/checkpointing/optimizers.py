"""The state of an optimizer: its functions, its own file, and whether it fits the optimizer that will load it.

torch loads any state whose groups have the right sizes, and fails in the next step. The entries of a parameter are
therefore compared with those that an optimizer of the same class makes for a tiny parameter in one step.
"""

from __future__ import annotations

import functools
import math
import numbers
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from pytorch_accelerated.checkpointing.codec import KEEP_LIVE
from pytorch_accelerated.checkpointing.matching import mismatch
from pytorch_accelerated.checkpointing.portable import load_portable
from pytorch_accelerated.checkpointing.verify import read_manifest, verify
from pytorch_accelerated.errors import InvalidCheckpointError
from pytorch_accelerated.models.sharding import is_sharded, sharded_like

OPTIMIZER_FILE = "optimizer.pt"
"""The optimizer's state as a file of its own, which other tools can read too."""
# These need closures or sparse gradients, or keep one state for all parameters.
_NOT_PROBED = ("LBFGS", "SparseAdam")
_IMPLEMENTATION_FLAGS = ("foreach", "fused", "capturable", "differentiable")
_NO_SETTINGS = ("params", *_IMPLEMENTATION_FLAGS)
_RATES = {"lr", "initial_lr", "max_lr", "min_lr", "swa_lr", "base_momentum", "max_momentum"}  # schedulers add some
# Limits that a cyclic schedule puts into a group. With a momentum of 1, optimizers divide by 0.
_MOMENTA = ("base_momentum", "max_momentum")
_SIZE = 2  # of each dimension of the tiny parameter


def hide_callables(state: dict[str, Any]) -> dict[str, Any]:
    """An optimizer's state dict with `KEEP_LIVE` in place of every callable in its parameter groups."""
    groups = [
        {key: KEEP_LIVE if callable(value) else value for key, value in group.items()}
        for group in state["param_groups"]
    ]
    return {**state, "param_groups": groups}


def without_callables(state: Mapping[str, Any]) -> dict[str, Any]:
    """An optimizer's state dict without the functions in its parameter groups, which `OPTIMIZER_FILE` can't hold."""
    groups = [{key: value for key, value in group.items() if not callable(value)} for group in state["param_groups"]]
    return {**state, "param_groups": groups}


def with_callables(state: Mapping[str, Any], optimizer: Any) -> dict[str, Any]:
    """The inverse of `hide_callables` and `without_callables`, with the functions of the live `optimizer`.

    Raises:
        InvalidCheckpointError: if `state` is not that of an optimizer; or names the functions that `optimizer` lacks.
    """
    groups = state.get("param_groups")
    if not isinstance(groups, list) or not all(isinstance(group, dict) for group in groups):
        raise InvalidCheckpointError(
            "The saved state is not that of an optimizer like torch's: its `param_groups` are not a list of dicts. Use "
            "another checkpoint."
        )
    live = getattr(optimizer, "param_groups", None) or []
    complete, missing = [], []
    for index, group in enumerate(groups):
        functions = {key: value for key, value in live[index].items() if callable(value)} if index < len(live) else {}
        hidden = [key for key, value in group.items() if value is KEEP_LIVE]
        missing += [f"param_groups[{index}].{key}" for key in hidden if key not in functions]
        complete.append({**functions, **{key: value for key, value in group.items() if key not in hidden}})
    if missing:
        raise InvalidCheckpointError(
            f"The saved optimizer had functions at {', '.join(missing)}, but the {type(optimizer).__name__} of this "
            "run has none there. Functions are not stored: create the optimizer with the same ones, then load."
        )
    return {**state, "param_groups": complete}


def read_optimizer_file(folder: Path) -> dict[str, Any] | None:
    """The state in a state folder's `OPTIMIZER_FILE`, without functions; None without such a file.

    Raises:
        InvalidCheckpointError: if the file was changed, or holds more than tensors and plain values.
    """
    if OPTIMIZER_FILE not in {entry.name for entry in read_manifest(folder).files}:
        return None
    verify(folder, {OPTIMIZER_FILE})
    return load_portable(folder / OPTIMIZER_FILE)


def load_optimizer_state(optimizer: Any, state: Mapping[str, Any]) -> None:
    """Load a state that passed `check_optimizer_state`; whole tensors are sharded like their parameters."""
    groups = getattr(optimizer, "param_groups", [])
    parameters = [parameter for group in groups for parameter in group["params"]]
    if any(map(is_sharded, parameters)):
        entries = {
            number: {key: sharded_like(parameters[number], value) for key, value in entry.items()}
            for number, entry in state["state"].items()
        }
        state = {**state, "state": entries}
    optimizer.load_state_dict(state)


def check_optimizer_state(optimizer: Any, state: Mapping[str, Any], *, source: object) -> None:
    """Refuse a state from `source` of another kind of optimizer, or of one with other parameters. Changes nothing."""
    live_groups = getattr(optimizer, "param_groups", None)
    if live_groups is None or (isinstance(state, Mapping) and "param_groups" not in state):
        return  # not built like torch's optimizers: it has to check its state itself
    kind = type(getattr(optimizer, "optimizer", optimizer)).__name__
    problem = problem_of_optimizer_state(state)
    if problem is not None:
        raise InvalidCheckpointError(
            f"The optimizer state in {source} cannot be that of this {kind}: {problem}. Use another one, or load "
            "without it."
        )
    saved_groups = state["param_groups"]
    live_sizes, saved_sizes = ([len(group["params"]) for group in groups] for groups in (live_groups, saved_groups))
    if live_sizes != saved_sizes:
        raise InvalidCheckpointError(
            f"The optimizer state in {source} has {saved_sizes} parameters in its groups, but this {kind} has "
            f"{live_sizes}: they were made for different models. Make the optimizer as it was when the state was "
            "saved, or load without it."
        )
    for live, saved in zip(live_groups, saved_groups, strict=True):
        missing = sorted(set(getattr(optimizer, "defaults", live)) - set(saved))
        unknown = sorted(set(saved) - set(live) - _RATES)
        # Another version of torch leaves some out, or adds some, but not both.
        if missing and unknown:
            raise InvalidCheckpointError(
                f"The optimizer state in {source} was saved by another kind of optimizer: it has "
                f"{', '.join(map(repr, unknown))}, but this {kind} needs {', '.join(map(repr, missing))}. Use the "
                "optimizer that it was saved with, or load without it."
            )
    problem = problem_of_entries(optimizer, state)
    if problem is not None:
        raise InvalidCheckpointError(
            f"The optimizer state in {source} does not fit this {kind}: {problem}. Make the optimizer as it was when "
            "the state was saved, or load without it."
        )


def problem_of_optimizer_state(state: Any) -> str | None:
    """Why `state` can't be the state dict of an optimizer like torch's; None if it can."""
    if not isinstance(state, Mapping):
        return f"it is a {type(state).__name__}"
    groups, entries = state.get("param_groups"), state.get("state", {})
    if not isinstance(groups, list) or not all(isinstance(group, Mapping) for group in groups):
        return "its parameter groups are not a list of dicts"
    numbers = [group.get("params") for group in groups]
    if not all(isinstance(some, list) and all(isinstance(number, (int, str)) for number in some) for some in numbers):
        return "a group does not say which parameters it has"
    if not isinstance(entries, Mapping):
        return "its entries for the parameters are not a dict"
    for number, entry in entries.items():
        if isinstance(entry, Mapping) and not _is_count(entry.get("step", 0)):
            return f"it says that parameter {number} has made {entry['step']} steps"
    return None


def problem_of_entries(optimizer: Any, state: Mapping[str, Any]) -> str | None:
    """Why the next step of `optimizer` would fail after loading `state`; None if it would not, or if that is unknown.

    The entries of parameters are compared for torch's own optimizers only. The groups must have equal sizes.
    """
    inner = getattr(optimizer, "optimizer", optimizer)
    entries = state.get("state", {})
    pairs = list(enumerate(zip(inner.param_groups, state["param_groups"], strict=True)))
    for index, (live, saved) in pairs:
        path = f"param_groups[{index}]"
        fixed = {name: value for name, value in _settings(saved).items() if value is not None or name in _RATES}
        problem = mismatch(_settings(live), fixed, path) or _problem_of_flags(saved, path)
        if problem is not None:
            return problem
    if not type(inner).__module__.startswith("torch.optim") or type(inner).__name__ in _NOT_PROBED:
        return None
    known = {number for group in state["param_groups"] for number in group["params"]}
    if any(number not in known for number in entries):
        return "it has entries for parameters that are in none of its groups"
    for index, (live, saved) in pairs:
        expected_for = functools.cache(functools.partial(_expected_entry, inner, index, saved))
        for number, parameter in zip(saved["params"], live["params"], strict=True):
            entry = entries.get(number, {})
            if entry == {} or nn.parameter.is_lazy(parameter):
                continue
            try:
                expected = expected_for(parameter.ndim, parameter.dtype)
            except (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError) as error:
                return f"a step with the settings of its groups fails ({type(error).__name__}: {error})"
            problem = None if expected is None else _problem_of_entry(entry, expected, parameter)
            if problem is not None:
                return f"its entry for parameter {number} is unusable: {problem}"
    return None


def _problem_of_flags(group: Mapping[str, Any], path: str) -> str | None:
    """Why the flags of a group, or the limits that a schedule has put into it, make its next step fail."""
    wrong = [name for name in _IMPLEMENTATION_FLAGS if type(group.get(name)) not in (bool, type(None))]
    if wrong:
        return f"{path}.{wrong[0]} is a {type(group[wrong[0]]).__name__}, not a bool"
    for name in _MOMENTA:
        value: Any = group.get(name, 0.0)
        if not (isinstance(value, numbers.Real) and 0 <= float(value) < 1):
            return f"{path}.{name} is {value!r}, not a number of at least 0 and below 1"
    return None


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """The plain settings of a group."""
    return {name: value for name, value in group.items() if name not in _NO_SETTINGS and not callable(value)}


def _expected_entry(
    optimizer: torch.optim.Optimizer, index: int, saved: Mapping[str, Any], dimensions: int, dtype: torch.dtype
) -> dict[str, Any] | None:
    """The entry for a parameter after a step with the saved settings of a group; None if it can't be computed.

    Raises whatever the step raises, if a step with the live settings works.
    """
    try:
        _entry_after_step(optimizer, optimizer.param_groups[index], dimensions, dtype)
    except Exception:  # the class needs arguments, or cannot compute with this dtype on the CPU
        return None
    return _entry_after_step(optimizer, saved, dimensions, dtype)


def _entry_after_step(
    optimizer: torch.optim.Optimizer, settings: Mapping[str, Any], dimensions: int, dtype: torch.dtype
) -> dict[str, Any]:
    parameter = nn.Parameter(torch.zeros((_SIZE,) * dimensions, dtype=dtype, device="cpu"))
    parameter.grad = torch.zeros_like(parameter)
    probe: Any = type(optimizer)([{"params": [parameter]}])  # type: ignore[call-arg]
    group = {
        name: value
        for name, value in settings.items()
        if name not in _NO_SETTINGS and not isinstance(value, torch.Tensor)
    }
    if "lr" in settings:
        group["lr"] = float(settings["lr"])
    group.update({name: False for name in _IMPLEMENTATION_FLAGS if name in probe.defaults})
    probe.load_state_dict({"state": {}, "param_groups": [{**group, "params": [0]}]})
    probe.step()
    return dict(probe.state[parameter])


def _problem_of_entry(entry: Any, expected: Mapping[str, Any], parameter: torch.Tensor) -> str | None:
    if not isinstance(entry, Mapping):
        return f"it is a {type(entry).__name__}"
    # SGD's momentum is None before its first step.
    missing = sorted(
        str(name)
        for name, value in expected.items()
        if value is not None and entry.get(name) is None and not (name == "momentum_buffer" and name in entry)
    )
    if missing:
        return f"it has no {', '.join(missing)}"
    for name, value in expected.items():
        saved = entry.get(name)
        if isinstance(value, torch.Tensor) and saved is not None:
            problem = _problem_of_tensor(saved, value, parameter)
            if problem is not None:
                return f"{name} {problem}"
    return None


def _problem_of_tensor(saved: Any, expected: torch.Tensor, parameter: torch.Tensor) -> str | None:
    if not expected.ndim:  # a count: a plain number in states of older versions
        is_count = (isinstance(saved, torch.Tensor) and saved.numel() == 1) or isinstance(saved, (int, float))
        return None if is_count else f"is a {type(saved).__name__}, not a number"
    if not isinstance(saved, torch.Tensor):
        return f"is a {type(saved).__name__}, not a tensor"
    is_of_parameter = expected.shape == (_SIZE,) * parameter.ndim
    if is_of_parameter and saved.shape != parameter.shape:
        return f"has the shape {tuple(saved.shape)}, but the parameter has {tuple(parameter.shape)}"
    if saved.ndim != expected.ndim or saved.is_floating_point() != expected.is_floating_point():
        return f"has {saved.ndim} dimensions of {saved.dtype}, not {expected.ndim} of {expected.dtype}"
    return None


def _is_count(steps: Any) -> bool:
    """Whether `steps`, a number or a tensor, can be a number of steps."""
    try:
        return math.isfinite(steps) and steps >= 0
    except (RuntimeError, TypeError, ValueError):
        return False
