"""The states of what a trainer holds besides model, optimizer and scheduler, by path (`models.held`)."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from pytorch_accelerated.checkpointing.codec import encode
from pytorch_accelerated.checkpointing.loading import check_same_kind
from pytorch_accelerated.checkpointing.optimizers import check_optimizer_state, with_callables, without_callables
from pytorch_accelerated.checkpointing.weights import canonical_state_dict, check_canonical
from pytorch_accelerated.errors import CheckpointError, InvalidCheckpointError


def held_states(held: Mapping[str, Any], *, warns: bool) -> dict[str, Any]:
    """The states of held parts, by path. Those that are empty are left out.

    So are those that cannot be stored, such as quantized weights; with `warns`, a warning names them.
    """
    states, reasons = {}, []
    for path, part in held.items():
        state = _state_of(part)
        try:
            encode(state, path=path)
        except CheckpointError as error:
            reasons.append(str(error).splitlines()[1].strip())
        else:
            if state:
                states[path] = state
    if reasons and warns:
        warnings.warn(
            f"Training states, and so resumed runs, leave out what the trainer holds at {'; '.join(reasons)}.",
            stacklevel=2,
        )
    return states


def checked_states(
    held: Mapping[str, Any], states: Mapping[str, Any], *, source: object, is_first: bool
) -> list[tuple[str, Any, Any]]:
    """Path, part and state of all held parts that are in `states`, which come from `source`. Changes nothing.

    Raises:
        InvalidCheckpointError: if a part does not exist any more, or is another one.
    """
    gone = [path for path in states if path not in held]
    if gone and is_first:  # the first rank's states are those of all, whatever the others hold
        raise InvalidCheckpointError(
            f"The run that saved {source} had {', '.join(gone)}, which this trainer and its loss function do not have. "
            "Nothing was loaded. Make the trainer as it was, before the run starts."
        )
    new = [path for path in held_states(held, warns=False) if path not in states]
    if new and is_first:
        warnings.warn(
            f"The training state {source} has no values of {', '.join(new)}: they stay as they are.",
            stacklevel=2,
        )
    checked = []
    for path, part in held.items():
        if path in states:
            try:
                checked.append((path, part, _checked(part, states[path], source)))
            except InvalidCheckpointError as error:
                raise InvalidCheckpointError(f"{path}: {error}") from error
    return checked


def held_modules(checked: list[tuple[str, Any, Any]]) -> list[tuple[nn.Module, Any]]:
    """The modules among `checked_states`, and those made of single parameters, with their states."""
    modules = [(_as_module(part), state) for _, part, state in checked]
    return [(module, state) for module, state in modules if module is not None]


def held_objects(checked: list[tuple[str, Any, Any]]) -> list[tuple[str, Any, Any]]:
    """The others: optimizers, schedulers and scalers."""
    return [each for each in checked if _as_module(each[1]) is None]


def _as_module(part: Any) -> nn.Module | None:
    if isinstance(part, torch.Tensor):
        return nn.ParameterDict({"value": part})
    return part if isinstance(part, nn.Module) else None


def _state_of(part: Any) -> Any:
    module = _as_module(part)
    if module is not None:
        return canonical_state_dict(module)
    state = part.state_dict()
    return without_callables(state) if hasattr(part, "param_groups") else state


def _checked(part: Any, state: Any, source: object) -> Any:
    module = _as_module(part)
    if module is not None:
        check_canonical(module, state)
    elif hasattr(part, "param_groups"):
        state = with_callables(state, part)
        check_optimizer_state(part, state, source=source)
    else:
        check_same_kind(part, state, source=source)
    return state
