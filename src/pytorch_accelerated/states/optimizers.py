"""The state of an optimizer: its functions, its own file, and whether it fits the optimizer that will load it.
`mismatch` compares any state with the live values that it would replace.

torch loads any state whose groups have the right sizes, and fails in the next step.
"""

from __future__ import annotations

import inspect
import numbers
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from pytorch_accelerated.errors import InvalidCheckpointError
from pytorch_accelerated.ranks.compat.torch import parts_of_schedule
from pytorch_accelerated.ranks.optimizers import Optimizers
from pytorch_accelerated.ranks.sharding import is_sharded, sharded_like
from pytorch_accelerated.states.portable import load_portable
from pytorch_accelerated.states.verify import read_manifest, verify

OPTIMIZER_FILE = "optimizer.pt"
"""The optimizer's state as a file of its own, which other tools can read too."""
_PLAIN = (bool, int, float, str, tuple, type(None))
_FLAT_STATE = "LBFGS"  # keeps one state for all parameters
_RATES = {"lr", "initial_lr", "max_lr", "min_lr", "swa_lr", "base_momentum", "max_momentum"}  # schedulers add some


def without_callables(state: Mapping[str, Any]) -> dict[str, Any]:
    """An optimizer's state dict without the functions in its parameter groups, which are not stored."""
    groups = [{key: value for key, value in group.items() if not callable(value)} for group in state["param_groups"]]
    return {**state, "param_groups": groups}


def with_callables(state: Mapping[str, Any], optimizer: Any) -> dict[str, Any]:
    """The inverse of `without_callables`, with the functions of the live `optimizer`."""
    inner = _inner(optimizer)
    ordered: Mapping[str, Any] = {**state, "param_groups": [dict(group) for group in state["param_groups"]]}
    if isinstance(inner, Optimizers):
        ordered = inner.in_order(ordered)
    for group, live in zip(ordered["param_groups"], getattr(optimizer, "param_groups", None) or [], strict=False):
        group.update({key: value for key, value in live.items() if callable(value)})
    return dict(ordered)


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
    """Load what `checked_optimizer_state` returned; whole tensors are sharded like their parameters.

    Their dtypes stay: torch gives floating-point numbers the dtype of the parameter, also NAdam's product of momenta.
    """
    groups = getattr(optimizer, "param_groups", [])
    parameters = [parameter for group in groups for parameter in group["params"]]
    if any(map(is_sharded, parameters)):
        entries = {
            number: {key: sharded_like(parameters[number], value) for key, value in entry.items()}
            for number, entry in state["state"].items()
        }
        state = {**state, "state": entries}
    optimizer.load_state_dict(state)
    inner = _inner(optimizer)
    numbers = [number for group in state.get("param_groups", ()) for number in group["params"]]
    for number, parameter in zip(numbers, parameters, strict=False):
        live = getattr(inner, "state", {}).get(parameter, {})
        _with_dtypes(inner, live, state["state"].get(number, {}))


def _with_dtypes(optimizer: Any, live: Any, saved: Any) -> Any:
    """The `live` value, with tensors of the `saved` one where they got another dtype. Changes dicts in place."""
    if isinstance(saved, Mapping) and isinstance(live, dict):
        live.update({key: _with_dtypes(optimizer, live[key], value) for key, value in saved.items() if key in live})
    elif type(saved) in (list, tuple) and type(live) is type(saved):
        return type(live)(_with_dtypes(optimizer, *pair) for pair in zip(live, saved, strict=True))
    if isinstance(saved, str):
        return saved  # torch takes its characters for numbers
    if not (isinstance(live, torch.Tensor) and isinstance(saved, torch.Tensor)):
        return live
    # Torch's own optimizers keep nothing but single numbers in another dtype than the parameter's.
    is_kept = not saved.ndim or not type(optimizer).__module__.startswith("torch.optim")
    return saved.to(live.device) if is_kept and live.dtype != saved.dtype else live


def checked_optimizer_state(optimizer: Any, state: Mapping[str, Any], *, source: object) -> Mapping[str, Any]:
    """The state for `load_optimizer_state`, with the functions of the live optimizer. Changes nothing.

    Raises:
        InvalidCheckpointError: if the state from `source` is of another kind of optimizer, or has other parameters.
    """
    if isinstance(state, Mapping) and "param_groups" not in state:
        return state  # not built like torch's optimizers: it has to check its state itself
    try:
        is_like_torch = all(isinstance(group["params"], list) for group in state["param_groups"])
        is_like_torch &= all(isinstance(entry, Mapping) for entry in state.get("state", {}).values())
    except (AttributeError, LookupError, TypeError):
        is_like_torch = False
    if is_like_torch:
        state = with_callables(state, optimizer)
        problem = problem_of_entries(optimizer, state)
    else:
        problem = "it is not the state of an optimizer like torch's"
    if problem is not None:
        raise InvalidCheckpointError(
            f"The optimizer state in {source} does not fit this {type(_inner(optimizer)).__name__}: {problem}. "
            f"{getattr(optimizer, 'advice', '')}Make the optimizer as it was when the state was saved, or load without "
            "it."
        )
    return state


def problem_of_entries(optimizer: Any, state: Mapping[str, Any]) -> str | None:
    """Why `state` does not fit the settings and parameters of `optimizer`; None if it does, or if that is unknown.

    The shapes of entries are compared for torch's own optimizers only.
    """
    inner = _inner(optimizer)
    live_sizes, saved_sizes = (
        [len(each["params"]) for each in one] for one in (inner.param_groups, state["param_groups"])
    )
    if live_sizes != saved_sizes:
        return f"it has {saved_sizes} parameters in its groups, but this {type(inner).__name__} has {live_sizes}"
    is_of_torch = type(inner).__module__.startswith("torch.optim") and type(inner).__name__ != _FLAT_STATE
    for index, (live, saved) in enumerate(zip(inner.param_groups, state["param_groups"], strict=True)):
        missing = sorted(set(getattr(inner, "defaults", live)) - set(saved))
        unknown = sorted(set(saved) - set(live) - _RATES)
        if missing and unknown:  # another version of torch leaves some out, or adds some, but not both
            names = f"{', '.join(map(repr, unknown))}, but not {', '.join(map(repr, missing))}"
            return f"it was saved by another kind of optimizer: it has {names}"
        settings = {name: value for name, value in saved.items() if value is not None or name in _RATES}
        problem = mismatch(_settings(live), _settings(settings), f"param_groups[{index}]")
        if problem is not None:
            return problem
        for number, parameter in zip(saved["params"], live["params"], strict=True) if is_of_torch else ():
            for name, value in state["state"].get(number, {}).items():
                if isinstance(value, torch.Tensor) and not _fits(value, parameter):
                    shapes = f"{tuple(value.shape)}, but the parameter has {tuple(parameter.shape)}"
                    return f"{name} of parameter {number} has the shape {shapes}"
    return None


def _inner(optimizer: Any) -> Any:
    return getattr(optimizer, "optimizer", optimizer)


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """The plain settings of a group."""
    return {name: value for name, value in group.items() if name != "params" and not callable(value)}


def _fits(value: torch.Tensor, parameter: torch.Tensor) -> bool:
    """Whether a tensor of an optimizer's state can belong to a parameter: a mean over a dimension has size 1 there."""
    if not value.ndim or nn.parameter.is_lazy(parameter):
        return True
    sizes = zip(value.shape, parameter.shape, strict=False)
    return value.ndim == parameter.ndim and all(size in (1, full) for size, full in sizes)


def optimizer_settings(optimizer: Any, *, has_schedule: bool) -> list[dict[str, Any]]:
    """The settings of each group of parameters, without those that change during a run.

    Args:
        optimizer: any optimizer.
        has_schedule: whether something changes the learning rate. Without that, it is a setting like others.
    """
    inner = _inner(optimizer)
    settings = []
    for one in inner if isinstance(inner, Optimizers) else [inner] * hasattr(inner, "param_groups"):
        # Some keep a state in their groups, as defaults that nobody can give: schedulefree its mode, for example.
        state = set(getattr(one, "defaults", ())) - set(inspect.signature(type(one)).parameters)
        for group in one.param_groups:
            changing = {"params"} | ({"lr"} if has_schedule or "initial_lr" in group else set())
            changing |= {"betas", "momentum"} if "max_momentum" in group else set()  # which schedules set, too
            values = {name: group[name] for name in group if name not in state | changing}
            rates = {name for name, value in values.items() if name in _RATES and isinstance(value, torch.Tensor)}
            values.update({name: float(values[name]) for name in rates})
            settings.append({name: value for name, value in values.items() if isinstance(value, _PLAIN)})
    return settings


def schedule_settings(scheduler: Any) -> list[dict[str, Any]]:
    """What schedulers were made with, as far as it is in their states, which bring it along: for each, and its parts.

    Those of this library and `LambdaLR` do not: a new one has the length that it is made for.
    """
    state = scheduler.state_dict() if hasattr(scheduler, "state_dict") else None
    if not isinstance(state, Mapping):
        return []
    given = inspect.signature(type(scheduler)).parameters
    names = sorted(name for name in given.keys() & state.keys() if not name.startswith("last_"))  # positions
    own = {f"{name} of {type(scheduler).__name__}": state[name] for name in names}
    plain = {name: value for name, value in own.items() if isinstance(value, (*_PLAIN, list, Counter))}
    return [plain, *(each for part in parts_of_schedule(scheduler) for each in schedule_settings(part))]


def replaced_settings(asked: Sequence[Mapping[str, Any]], loaded: Sequence[Mapping[str, Any]]) -> list[str]:
    """The settings of `asked` that have another value in `loaded`, in words."""
    differences = {
        f"{'learning_rate' if name in ('lr', 'initial_lr') else name}: {group[name]!r}, not {value!r}"
        for group, wanted in zip(loaded, asked, strict=True)
        for name, value in wanted.items()
        if name in group and group[name] != value
    }
    return sorted(differences)


def mismatch(live: Any, saved: Any, path: str) -> str | None:
    """The first place where `saved` is of another kind than `live`, in words; None if there is none.

    Only items that both containers have are compared. Anything fits where `live` is None, or is not a plain value.

    >>> mismatch({"last_epoch": 3, "factor": 0.5}, {"last_epoch": "x", "factor": 1}, "scheduler")
    'scheduler.last_epoch is a str, not an int'
    """
    items: list[tuple[Any, Any, str]] = []
    if isinstance(live, Mapping) and isinstance(saved, Mapping):
        items = [(value, saved[key], f"{path}.{key}") for key, value in live.items() if key in saved]
    elif isinstance(live, (list, tuple)) and isinstance(saved, (list, tuple)):
        items = [(*pair, f"{path}[{index}]") for index, pair in enumerate(zip(live, saved, strict=False))]
    complaint = next(filter(None, (mismatch(*item) for item in items)), None)
    if complaint is not None:
        return complaint
    if _is_number(live):
        fits = _is_number(saved)
    elif isinstance(live, torch.Tensor):
        fits = isinstance(saved, torch.Tensor) or _is_number(saved)
    else:
        kinds: tuple[Any, ...] = (Mapping, (list, tuple), str, bytes, bool)
        fits = isinstance(saved, next((kind for kind in kinds if isinstance(live, kind)), object))
    if fits:
        return None
    name = type(live).__name__
    return f"{path} is a {type(saved).__name__}, not a{'n' * (name[0] in 'aeio')} {name}"


def _is_number(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.ndim == 0 and not value.is_complex() and value.dtype != torch.bool
    return isinstance(value, numbers.Real) and not isinstance(value, bool)
