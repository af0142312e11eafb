"""Whether the saved state of an optimizer belongs to the one that is to take it over."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pytorch_accelerated.errors import InvalidCheckpointError

# What schedulers leave in parameter groups.
_OF_SCHEDULERS = {"initial_lr", "max_lr", "min_lr", "swa_lr", "base_momentum", "max_momentum"}


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
    live_groups, saved_groups = getattr(optimizer, "param_groups", None), state.get("param_groups")
    if live_groups is None or saved_groups is None:
        return  # neither torch's nor like torch's: it knows itself what it can load
    kind = type(getattr(optimizer, "optimizer", optimizer)).__name__
    live_sizes, saved_sizes = ([len(group["params"]) for group in groups] for groups in (live_groups, saved_groups))
    if live_sizes != saved_sizes:
        raise InvalidCheckpointError(
            f"The optimizer state in {source} has {saved_sizes} parameters in its groups, but this {kind} has "
            f"{live_sizes}: they were made for different models. Make the optimizer as it was when the state was "
            "saved, or load without it."
        )
    for live, saved in zip(live_groups, saved_groups, strict=True):
        missing = sorted(set(getattr(optimizer, "defaults", live)) - set(saved))
        unknown = sorted(set(saved) - set(live) - _OF_SCHEDULERS)
        # One of them alone is what another version of torch leaves out or adds.
        if missing and unknown:
            raise InvalidCheckpointError(
                f"The optimizer state in {source} was saved by another kind of optimizer: it has "
                f"{', '.join(map(repr, unknown))}, but this {kind} needs {', '.join(map(repr, missing))}. Use the "
                "optimizer that it was saved with, or load without it."
            )
