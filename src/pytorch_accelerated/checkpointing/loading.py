"""The states of several objects are loaded together: all of them, or none."""

from __future__ import annotations

import contextlib
import copy
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from torch.optim.lr_scheduler import LRScheduler

from pytorch_accelerated.checkpointing.matching import mismatch
from pytorch_accelerated.checkpointing.optimizers import load_optimizer_state
from pytorch_accelerated.errors import InvalidCheckpointError, PytorchAcceleratedError
from pytorch_accelerated.models.deepspeed import ZeroOptimizer

_POWERS = 16  # of two: the numbers of updates for which a scheduler is tried
_UNCHECKED = ("torch.", "timm.")  # objects from these packages load whatever they are given
_COUNTS = ("last_epoch", "_step_count", "num_bad_epochs", "cooldown_counter", "last_update")  # of schedulers


@contextlib.contextmanager
def all_or_nothing() -> Iterator[contextlib.ExitStack]:
    """Run the callbacks of the stack, last one first, if an exception leaves the block; otherwise drop them."""
    with contextlib.ExitStack() as undo:
        yield undo
        undo.pop_all()


@contextlib.contextmanager
def explained_loading(what: str, source: object) -> Iterator[None]:
    """Turn any error of an object (`what`) that cannot load its state from `source` into `InvalidCheckpointError`."""
    try:
        yield
    except PytorchAcceleratedError:
        raise
    except Exception as error:
        raise InvalidCheckpointError(
            f"{what} cannot load its state from {source} ({type(error).__name__}: {error}). Nothing was changed. "
            "Make everything as it was when the state was saved, or use another one."
        ) from error


def keep_object(undo: contextlib.ExitStack, target: Any) -> None:
    """Add to `undo` a step that restores the attributes of `target`, and the contents of its lists, dicts and sets."""
    if not hasattr(target, "__dict__"):
        return
    before = dict(vars(target))
    contents = [(value, value.copy()) for value in before.values() if type(value) in (list, dict, set)]

    def restore() -> None:
        vars(target).clear()
        vars(target).update(before)
        for value, items in contents:
            value.clear()
            value.extend(items) if isinstance(value, list) else value.update(items)

    undo.callback(restore)


def keep_optimizer(undo: contextlib.ExitStack, optimizer: Any) -> None:
    """Add to `undo` a step that restores the state and the groups of an optimizer. Copies no tensors.

    torch's optimizers make a new state when they load one, so it is enough to keep the old one.
    """
    inner = getattr(optimizer, "optimizer", optimizer)
    if not (hasattr(inner, "param_groups") and hasattr(inner, "state")):
        state = copy.deepcopy(inner.state_dict())
        undo.callback(lambda: inner.load_state_dict(state))
        return
    state, groups = inner.state, inner.param_groups
    entries = dict(state)
    settings = [dict(group) for group in groups]

    def restore() -> None:
        state.clear()
        state.update(entries)
        for group, before in zip(groups, settings, strict=True):
            group.clear()
            group.update(before)
        inner.state, inner.param_groups = state, groups

    undo.callback(restore)


def load_states(
    load_model: Callable[[], None],
    optimizer: Any,
    optimizer_state: Any,
    others: Iterable[tuple[str, Any, Any]],
    undo: contextlib.ExitStack,
    *,
    source: object,
) -> None:
    """Load states that were checked as far as possible. `undo` restores everything if one fails all the same.

    The weights come last, because they are changed in place.

    Args:
        load_model: loads the weights.
        optimizer: loads `optimizer_state`, unless that is None.
        others: a name, an object with `load_state_dict`, and its state.
        undo: from `all_or_nothing`.
        source: where the states come from, for messages.

    Raises:
        InvalidCheckpointError: names the object that cannot load its state.
    """
    weights_first = isinstance(optimizer, ZeroOptimizer)  # it copies the weights that the model has when it loads
    if weights_first:
        load_model()
    if optimizer is not None:
        keep_optimizer(undo, optimizer)
    if optimizer_state is not None:
        with explained_loading(type(optimizer).__name__, source):
            load_optimizer_state(optimizer, optimizer_state)
    for name, target, state in others:
        keep_object(undo, target)
        with explained_loading(name, source):
            target.load_state_dict(state)
            if isinstance(target, LRScheduler):
                _try_next_rates(target)
    if not weights_first:
        load_model()


def _try_next_rates(scheduler: LRScheduler) -> None:
    """Have a copy of a torch scheduler compute some later rates, so that a bad state fails now, not during training."""
    is_computed = type(scheduler).get_lr is not LRScheduler.get_lr and not hasattr(scheduler, "lr_lambdas")
    if not is_computed:  # other schedulers, or the user's functions, compute its rates
        return
    probe: Any = copy.copy(scheduler)
    probe.optimizer = copy.copy(scheduler.optimizer)
    probe.optimizer.param_groups = [dict(group) for group in scheduler.optimizer.param_groups]
    first, end = probe.last_epoch + 1, getattr(probe, "total_steps", math.inf)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # `get_lr` warns unless the scheduler's own `step` calls it
        for step in sorted({min(first + 2**power - 1, end - 1) for power in range(_POWERS)}):
            if step >= first:
                probe.last_epoch = step
                probe.get_lr()


def check_same_kind(target: Any, state: Any, *, source: object) -> None:
    """Refuse a state from `source` that was saved by another kind of scheduler or scaler than `target`.

    Most of them load whatever they are given, and fail at the next step, or never.
    """
    kind = type(target).__name__
    live = target.state_dict()
    problem = mismatch(live, state, "its state") or _mismatch_of_names(target, live, state)
    if problem is not None:
        raise InvalidCheckpointError(
            f"The state of the {kind} in {source} cannot be loaded: {problem}. Nothing was changed. Make the "
            f"{kind} as it was when the state was saved, or use another one."
        )


def _mismatch_of_names(target: Any, live: Mapping[str, Any], state: Mapping[str, Any]) -> str | None:
    unknown = sorted(str(name) for name in state if name not in live)
    missing = sorted(str(name) for name in live if name not in state)
    methods = [name for name in unknown if callable(getattr(type(target), name, None))]
    if methods:
        return f"it has {', '.join(methods)}, which would replace methods"
    if unknown and missing and type(target).__module__.startswith(_UNCHECKED):
        return f"it has {', '.join(unknown)}, but not {', '.join(missing)}: another kind wrote it"
    for name in _COUNTS:
        if type(live.get(name)) is int and type(state.get(name, 0)) is not int:
            return f"{name} is {state[name]!r}, which is not a count"
    groups = getattr(getattr(target, "optimizer", None), "param_groups", None)
    for name in ("base_lrs", "_last_lr"):  # of schedulers: one rate for each parameter group
        rates = state.get(name)
        if groups is not None and isinstance(rates, list) and len(rates) != len(groups):
            return f"it has {len(rates)} rates in {name}, but the optimizer has {len(groups)} groups"
    return None
