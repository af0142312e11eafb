"""The states of several objects are loaded together, all of them or none: those of a training state or of one file."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from pytorch_accelerated.checkpointing.matching import mismatch
from pytorch_accelerated.checkpointing.optimizers import check_optimizer_state, load_optimizer_state
from pytorch_accelerated.checkpointing.portable import load_portable, save_portable
from pytorch_accelerated.checkpointing.weights import canonical_state_dict, check_canonical, load_canonical
from pytorch_accelerated.errors import InvalidCheckpointError, explained_loading
from pytorch_accelerated.facts.context import Context
from pytorch_accelerated.models.deepspeed import ZeroOptimizer
from pytorch_accelerated.models.kept import Kept, kept
from pytorch_accelerated.models.sharding import whole

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
    weights_first = isinstance(optimizer, ZeroOptimizer)  # it copies the weights that the model has when it loads
    if weights_first:
        load_weights()
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
    if not weights_first:
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
