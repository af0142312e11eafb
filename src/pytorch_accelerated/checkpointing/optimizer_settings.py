"""Settings of an optimizer that a saved state replaces, such as the learning rate and the weight decay."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_PLAIN = (bool, int, float, str, tuple, type(None))


def optimizer_settings(optimizer: Any, *, has_schedule: bool) -> list[dict[str, Any]]:
    """The settings of each group of parameters, without those that change during a run.

    Args:
        optimizer: any optimizer.
        has_schedule: whether something changes the learning rate. Without that, it is a setting like others.
    """
    return [
        {
            name: value
            for name, value in group.items()
            if isinstance(value, _PLAIN)
            and name != "params"
            and not (name == "lr" and (has_schedule or "initial_lr" in group))
            and not ("max_momentum" in group and name in ("betas", "momentum"))  # which schedules set, too
        }
        for group in getattr(optimizer, "param_groups", [])
    ]


def replaced_settings(asked: Sequence[Mapping[str, Any]], loaded: Sequence[Mapping[str, Any]]) -> list[str]:
    """The settings of `asked` that have another value in `loaded`, in words."""
    differences = {
        f"{'learning_rate' if name in ('lr', 'initial_lr') else name}: {group[name]!r}, not {value!r}"
        for group, wanted in zip(loaded, asked, strict=True)
        for name, value in wanted.items()
        if name in group and group[name] != value
    }
    return sorted(differences)
