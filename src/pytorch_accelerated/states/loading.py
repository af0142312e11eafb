"""The states of several objects are loaded together, all of them or none: those of a training state or of one file.

Among them are those of what a trainer holds besides model, optimizer and scheduler, by path (`models.held`).
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from pytorch_accelerated.errors import CheckpointError, InvalidCheckpointError, explained_loading
from pytorch_accelerated.ranks.keeping import Kept, kept
from pytorch_accelerated.ranks.sharding import whole
from pytorch_accelerated.states.codec import encode
from pytorch_accelerated.states.matching import mismatch
from pytorch_accelerated.states.optimizers import (
    check_optimizer_state,
    load_optimizer_state,
    with_callables,
    without_callables,
)
from pytorch_accelerated.states.portable import load_portable, save_portable
from pytorch_accelerated.states.weights import canonical_state_dict, check_canonical, load_canonical

if TYPE_CHECKING:
    from pytorch_accelerated.loop.context import Context

_UNCHECKED = ("torch.", "timm.")  # objects from these packages load whatever they are given


def load_states(
    load_weights: Callable[[], None],
    optimizer: Any,
    optimizer_state: Any,
    others: Iterable[tuple[str, Any, Any]],
    undo: Kept,
    *,
    source: object,
) -> None:
    """Load states that were checked as far as possible. If one fails all the same, `undo` restores everything.

    The weights come last, because they are changed in place.

    Args:
        load_weights: loads the weights.
        optimizer: loads `optimizer_state`, unless that is None.
        others: a name, an object with `load_state_dict`, and its state.
        undo: keeps what is changed before the weights.
        source: where the states come from, for messages.

    Raises:
        InvalidCheckpointError: names the object that cannot load its state.
    """
    if optimizer is not None:
        undo.optimizer(optimizer, steps=False)
    if optimizer_state is not None:
        with explained_loading(type(optimizer).__name__, source):
            load_optimizer_state(optimizer, optimizer_state)
    for name, target, state in others:
        with explained_loading(name, source):
            if hasattr(target, "param_groups"):
                undo.optimizer(target, steps=False)
                load_optimizer_state(target, state)
            else:
                undo.object(target)
                target.load_state_dict(state)
    load_weights()


def check_same_kind(target: Any, state: Any, *, source: object) -> None:
    """Refuse a state from `source` that was saved by another kind of scheduler or scaler than `target`.

    Most of them load whatever they are given, and fail at the next step, or never.
    """
    kind = type(target).__name__
    live = target.state_dict()
    problem = mismatch(live, state, "its state") or _mismatch_of_names(target, live, state)
    if problem is not None:
        raise InvalidCheckpointError(
            f"The state of the {kind} in {source} cannot be loaded: {problem}. Nothing was changed. Make it as it was."
        )


def _mismatch_of_names(target: Any, live: Mapping[str, Any], state: Mapping[str, Any]) -> str | None:
    unknown = sorted(str(name) for name in state if name not in live)
    missing = sorted(str(name) for name in live if name not in state)
    if unknown and missing and type(target).__module__.startswith(_UNCHECKED):
        return f"it has {', '.join(unknown)}, but not {', '.join(missing)}: another kind wrote it"
    return None


def save_checkpoint(
    path: str | Path,
    run: Context,
    model: Any,
    extra: Mapping[str, Any],
    *,
    optimizer: bool,
    scheduler: bool,
    per_node: bool,
) -> None:
    """Write a portable file. Must be called by all ranks; when it returns, all of them can load the file.

    Args:
        path: of the file.
        run: has the optimizer and the scheduler.
        model: the bare module.
        extra: further entries.
        optimizer, scheduler: whether their states are wanted, if there is one.
        per_node: whether the first rank of each node writes, or only the first of all.
    """
    with run.mode.evaluating():
        run.states.check_finite()  # on every rank, so that all of them get the error
        checkpoint: dict[str, Any] = {"model_state_dict": whole(canonical_state_dict(model))}
        if optimizer and run.optimizer is not None:
            checkpoint["optimizer_state_dict"] = whole(run.optimizer.state_dict())
        if scheduler and run.scheduler is not None:
            checkpoint["scheduler_state_dict"] = run.scheduler.state_dict()

        def write() -> None:
            if run.ranks.is_first_of_node if per_node else run.ranks.is_first:
                save_portable(path, {**checkpoint, **extra})

        run.ranks.do_on_all(write)


def load_checkpoint(path: str | Path, run: Context, model: Any, *, optimizer: bool, scheduler: bool) -> dict[str, Any]:
    """Load a file that `save_checkpoint` wrote. Returns all its entries.

    Raises:
        MissingCheckpointError: a FileNotFoundError, if there is no such file.
        InvalidCheckpointError: if the file is damaged or belongs to another model or optimizer; then nothing is
            changed.
    """
    checkpoint = load_portable(path)
    if "model_state_dict" not in checkpoint:
        raise InvalidCheckpointError(
            f"{path} has no 'model_state_dict', only {', '.join(map(repr, checkpoint)) or 'nothing'}. "
            "Load a file that `save_checkpoint` wrote."
        )
    optimizer_state = checkpoint.get("optimizer_state_dict") if optimizer and run.optimizer is not None else None
    scheduler_state = checkpoint.get("scheduler_state_dict") if scheduler and run.scheduler is not None else None
    check_canonical(model, checkpoint["model_state_dict"])
    if optimizer_state is not None:
        check_optimizer_state(run.optimizer, optimizer_state, source=path)
    others = []
    if scheduler_state is not None:
        check_same_kind(run.scheduler, scheduler_state, source=path)
        others = [(type(run.scheduler).__name__, run.scheduler, scheduler_state)]
    load_model = functools.partial(load_canonical, model, checkpoint["model_state_dict"])
    with kept(only_if_it_fails=True) as undo:
        load_states(load_model, run.optimizer, optimizer_state, others, undo, source=path)
    return checkpoint


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
