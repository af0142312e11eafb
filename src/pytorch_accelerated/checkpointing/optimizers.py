"""Whether the saved state of an optimizer belongs to the one that is to take it over."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from pytorch_accelerated.checkpointing.optimizer_kinds import RATES, problem_of_entries
from pytorch_accelerated.errors import InvalidCheckpointError
from pytorch_accelerated.models.sharding import is_sharded, sharded_like


def check_optimizer_state(optimizer: Any, state: Mapping[str, Any], *, source: object) -> None:
    """Refuse the state of another kind of optimizer, or of one with other parameters, before anything is changed.

    torch itself takes over any state whose groups have the right sizes, and fails in the first step.

    Args:
        optimizer: the live one.
        state: what its `load_state_dict` is going to get.
        source: where the state comes from, for the message.

    Raises:
        InvalidCheckpointError: says what does not fit.
    """
    live_groups = getattr(optimizer, "param_groups", None)
    if live_groups is None or (isinstance(state, Mapping) and "param_groups" not in state):
        return  # neither torch's nor like torch's: it knows itself what it can load
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
        unknown = sorted(set(saved) - set(live) - RATES)
        # One of them alone is what another version of torch leaves out or adds.
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


def load_optimizer_state(optimizer: Any, state: Mapping[str, Any]) -> None:
    """Load what `check_optimizer_state` has let pass; whole tensors are cut as the parameters that they belong to."""
    groups = getattr(optimizer, "param_groups", [])
    parameters = [parameter for group in groups for parameter in group["params"]]
    if any(map(is_sharded, parameters)):
        entries = {
            number: {key: sharded_like(parameters[number], value) for key, value in entry.items()}
            for number, entry in state["state"].items()
        }
        state = {**state, "state": entries}
    optimizer.load_state_dict(state)


def problem_of_optimizer_state(state: Any) -> str | None:
    """What keeps `state` from being one that an optimizer of torch's kind returned, if anything does."""
    if not isinstance(state, Mapping):
        return f"it is a {type(state).__name__}"
    groups, entries = state.get("param_groups"), state.get("state", {})
    if not isinstance(groups, list) or not all(isinstance(group, Mapping) for group in groups):
        return "its groups of parameters are no list of dicts"
    numbers = [group.get("params") for group in groups]
    if not all(isinstance(some, list) and all(isinstance(number, (int, str)) for number in some) for some in numbers):
        return "a group does not say which parameters it has"
    if not isinstance(entries, Mapping):
        return "it holds nothing about the parameters"
    for number, entry in entries.items():
        if isinstance(entry, Mapping) and not _is_count(entry.get("step", 0)):
            return f"it says that parameter {number} has made {entry['step']} steps"
    return None


def _is_count(steps: Any) -> bool:
    """Whether so many steps can have been made; torch has them as numbers and as tensors."""
    try:
        return math.isfinite(steps) and steps >= 0
    except (RuntimeError, TypeError, ValueError):
        return False
