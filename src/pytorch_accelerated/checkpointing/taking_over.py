"""States of several objects are taken over together: all of them, or none."""

from __future__ import annotations

import contextlib
import copy
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from torch.optim.lr_scheduler import LRScheduler

from pytorch_accelerated.checkpointing.likeness import misfit
from pytorch_accelerated.checkpointing.optimizers import load_optimizer_state
from pytorch_accelerated.errors import InvalidCheckpointError, PytorchAcceleratedError
from pytorch_accelerated.models.deepspeed import ZeroOptimizer

_POWERS = 16  # of two: the updates at which a scheduler is tried
_WITHOUT_A_LOOK = ("torch.", "timm.")  # these take over whatever they are given
_COUNTS = ("last_epoch", "_step_count", "num_bad_epochs", "cooldown_counter", "last_update")  # of schedulers


@contextlib.contextmanager
def all_or_nothing() -> Iterator[contextlib.ExitStack]:
    """What is entered in the stack is undone, the last first, if an exception leaves the block."""
    with contextlib.ExitStack() as undo:
        yield undo
        undo.pop_all()


@contextlib.contextmanager
def explained_taking_over(what: str, source: object) -> Iterator[None]:
    """Turns whatever an object raises at a state that it cannot take over into an `InvalidCheckpointError`.

    Args:
        what: names the object.
        source: where the state comes from.
    """
    try:
        yield
    except PytorchAcceleratedError:
        raise
    except Exception as error:
        raise InvalidCheckpointError(
            f"{what} cannot take over its state in {source} ({type(error).__name__}: {error}). Nothing was changed. "
            "Make everything as it was when the state was saved, or use another one."
        ) from error


def keep_object(undo: contextlib.ExitStack, target: Any) -> None:
    """Have the attributes of `target` put back as they are now, and what its lists, dicts and sets hold."""
    if not hasattr(target, "__dict__"):
        return
    before = dict(vars(target))
    contents = [(value, value.copy()) for value in before.values() if type(value) in (list, dict, set)]

    def put_back() -> None:
        vars(target).clear()
        vars(target).update(before)
        for value, items in contents:
            value.clear()
            value.extend(items) if isinstance(value, list) else value.update(items)

    undo.callback(put_back)


def keep_optimizer(undo: contextlib.ExitStack, optimizer: Any) -> None:
    """Have the state and the groups of an optimizer put back as they are now. Copies no tensors.

    torch's optimizers make a new state when they load one, so the old one need only be kept.
    """
    inner = getattr(optimizer, "optimizer", optimizer)
    if not (hasattr(inner, "param_groups") and hasattr(inner, "state")):
        state = copy.deepcopy(inner.state_dict())
        undo.callback(lambda: inner.load_state_dict(state))
        return
    state, groups = inner.state, inner.param_groups
    entries = dict(state)
    settings = [dict(group) for group in groups]

    def put_back() -> None:
        state.clear()
        state.update(entries)
        for group, before in zip(groups, settings, strict=True):
            group.clear()
            group.update(before)
        inner.state, inner.param_groups = state, groups

    undo.callback(put_back)


def take_over(
    load_model: Callable[[], None],
    optimizer: Any,
    optimizer_state: Any,
    others: Iterable[tuple[str, Any, Any]],
    undo: contextlib.ExitStack,
    *,
    source: object,
) -> None:
    """Load states that were checked, as far as that is possible. What goes wrong all the same is undone by `undo`.

    The weights come last, since they are changed in place.

    Args:
        load_model: loads the weights.
        optimizer: takes over `optimizer_state`, unless that is None.
        optimizer_state: of it.
        others: a name, an object with `load_state_dict`, and its state.
        undo: of `all_or_nothing`.
        source: where the states come from.

    Raises:
        InvalidCheckpointError: names what cannot take over its state.
    """
    is_last = not isinstance(optimizer, ZeroOptimizer)  # which takes over the weights that the model has by then
    if not is_last:
        load_model()
    if optimizer is not None:
        keep_optimizer(undo, optimizer)
    if optimizer_state is not None:
        with explained_taking_over(type(optimizer).__name__, source):
            load_optimizer_state(optimizer, optimizer_state)
    for name, target, state in others:
        keep_object(undo, target)
        with explained_taking_over(name, source):
            target.load_state_dict(state)
            if isinstance(target, LRScheduler):
                _try_next_rates(target)
    if is_last:
        load_model()


def _try_next_rates(scheduler: LRScheduler) -> None:
    """Have a copy of a scheduler of torch's compute some rates to come, so that it fails now where it is going to."""
    is_computed = type(scheduler).get_lr is not LRScheduler.get_lr and not hasattr(scheduler, "lr_lambdas")
    if not is_computed:  # by other schedulers, or by functions of the user's
        return
    probe: Any = copy.copy(scheduler)
    probe.optimizer = copy.copy(scheduler.optimizer)
    probe.optimizer.param_groups = [dict(group) for group in scheduler.optimizer.param_groups]
    first, end = probe.last_epoch + 1, getattr(probe, "total_steps", math.inf)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # they expect to be asked by their own `step`
        for step in sorted({min(first + 2**power - 1, end - 1) for power in range(_POWERS)}):
            if step >= first:
                probe.last_epoch = step
                probe.get_lr()


def check_like(target: Any, state: Any, *, source: object) -> None:
    """Refuse the state of another kind of scheduler or scaler than `target`.

    Most of them take over whatever they are given, and fail at the next step, or never.

    Args:
        target: the live one, with a `state_dict`.
        state: what its `load_state_dict` is going to get.
        source: where it comes from.

    Raises:
        InvalidCheckpointError: says what does not fit.
    """
    kind = type(target).__name__
    live = target.state_dict()
    problem = misfit(live, state, "its state") or _misfit_of_names(target, live, state)
    if problem is not None:
        raise InvalidCheckpointError(
            f"The state of the {kind} in {source} cannot be taken over: {problem}. Nothing was changed. Make the "
            f"{kind} as it was when the state was saved, or use another one."
        )


def _misfit_of_names(target: Any, live: Mapping[str, Any], state: Mapping[str, Any]) -> str | None:
    unknown = sorted(str(name) for name in state if name not in live)
    missing = sorted(str(name) for name in live if name not in state)
    methods = [name for name in unknown if callable(getattr(type(target), name, None))]
    if methods:
        return f"it has {', '.join(methods)}, which would take the place of methods"
    if unknown and missing and type(target).__module__.startswith(_WITHOUT_A_LOOK):
        return f"it has {', '.join(unknown)}, but not {', '.join(missing)}: another kind wrote it"
    for name in _COUNTS:
        if type(live.get(name)) is int and type(state.get(name, 0)) is not int:
            return f"{name} is {state[name]!r}, which is no count"
    return _misfit_of_groups(target, state)


def _misfit_of_groups(target: Any, state: Mapping[str, Any]) -> str | None:
    """Of schedulers: one rate for each group of parameters."""
    groups = getattr(getattr(target, "optimizer", None), "param_groups", None)
    for name in ("base_lrs", "_last_lr"):
        rates = state.get(name)
        if groups is not None and isinstance(rates, list) and len(rates) != len(groups):
            return f"it has {len(rates)} rates in {name}, and the optimizer {len(groups)} groups"
    return None
