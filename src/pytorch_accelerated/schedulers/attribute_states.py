"""Scheduler states of pytorch-accelerated 0.1, which hold the attributes of the scheduler.

The number of updates, if present, is ``num_updates`` or ``_num_updates``, the base values of groups are
``base_lr_values``, and some settings have other names than here.
"""

from __future__ import annotations

import numbers
from collections.abc import Callable, Mapping
from typing import Any

from pytorch_accelerated.errors import InvalidCheckpointError

_COUNTERS = ("num_updates", "_num_updates")
_BASE_VALUES = "base_lr_values"
# These follow from the other entries.
_DERIVED = {"_initial_param_group_field", "checkpoint_decay_info", "previous_checkpoint_step"}
_OUR_NAMES: dict[str, str] = {
    "lr_min_ratio": "min_lr_ratio",
    "warmup_iterations": "num_warmup_updates",
    "num_warmup_steps": "num_warmup_updates",
    "warmup_lr_init": "warmup_starting_lr",
    "warmup_lr_ratio": "warmup_starting_lr_ratio",
    "total_iterations": "total_updates",
    "num_cooldown_iterations": "num_cooldown_updates",
}
_OUR_METHODS = {"checkpoint_steps": "get_checkpoint_steps"}
_MISSING = object()


def holds_attributes(state: Mapping[str, Any]) -> bool:
    """Whether `state` has the form of version 0.1."""
    return "values" not in state and not {*_COUNTERS, _BASE_VALUES}.isdisjoint(state)


def in_own_form(state: Mapping[str, Any], live: Mapping[str, Any]) -> dict[str, Any]:
    """`state` in the form of our own states.

    Args:
        state: passed `holds_attributes`.
        live: the state of the scheduler that will load the result; provides what `state` lacks.

    Raises:
        InvalidCheckpointError: if the counter is not a number of updates, or a base value is not a number.
    """
    base_values = state.get(_BASE_VALUES, live["base_values"])
    if not isinstance(base_values, (list, tuple)) or not all(_is_number(value) for value in base_values):
        raise InvalidCheckpointError(
            f"The state of the scheduler has {_BASE_VALUES}={base_values!r}, but this must be a list with one number "
            "for each parameter group. Use another one, or load without it."
        )
    own = {**live, "base_values": [float(value) for value in base_values]}
    count = _counter(state)
    if count is not None and "last_update" in live:
        if not isinstance(count, int) or isinstance(count, bool) or count < -1:
            raise InvalidCheckpointError(
                f"The state of the scheduler has {count!r} for the number of updates, which is invalid. Use another "
                "one, or load without it."
            )
        own["last_update"] = count
    return own


def ignored_parts(scheduler: object, state: Mapping[str, Any]) -> str | None:
    """A warning about the parts of a state of version 0.1 that a scheduler ignores; None if it uses all of them.

    A scheduler keeps the settings that it was made with, because they are those of the run.
    """
    complaints = []
    others = [
        f"{name}={value!r} ({'it has none' if ours is _MISSING else f'here {ours!r}'})"
        for name, value in state.items()
        if name not in {*_COUNTERS, _BASE_VALUES, *_DERIVED}
        if (ours := _setting(scheduler, name)) is _MISSING or ours != value
    ]
    if others:
        complaints.append(
            "It keeps the settings that it was made with, so these settings in the saved state are ignored: "
            f"{', '.join(others)}. Make it with the same ones to follow the same curve."
        )
    if _counter(state) is None:
        complaints.append(
            "The state does not include the number of finished updates, so the schedule stays where it is. Call "
            "`scheduler.step_update(number_of_finished_updates)` to set it."
        )
    return " ".join(complaints) or None


def _counter(state: Mapping[str, Any]) -> Any:
    return next((state[name] for name in _COUNTERS if name in state), None)


def _setting(scheduler: object, name: str) -> Any:
    if name in _OUR_METHODS:
        method: Callable[[], Any] | None = getattr(scheduler, _OUR_METHODS[name], None)
        return _MISSING if method is None else method()
    return getattr(scheduler, _OUR_NAMES.get(name, name), _MISSING)


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)
