"""Loads the parts of a training state, or of one portable file, together: all of them or none.

Loading changes a model, an optimizer, a scheduler, callbacks, a history and counts. Half a state would be worse than
none: a script that catches the error would keep training with it. So everything is read and checked first, as far as
that changes nothing. Users' callbacks and schedulers check their states only while they load them; what was changed
before such a late failure is undone.
"""

from __future__ import annotations

import dataclasses
import re
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from pytorch_accelerated.data.resuming import restore_stream
from pytorch_accelerated.errors import InvalidCheckpointError, explained_loading
from pytorch_accelerated.facts.run_state import RunPhase, RunState
from pytorch_accelerated.facts.seeding import check_generator_states, restore_generator_states
from pytorch_accelerated.ranks.held import held_parts, optimizers_of
from pytorch_accelerated.ranks.keeping import kept
from pytorch_accelerated.ranks.preparation import OptimizerMode
from pytorch_accelerated.ranks.ranks import Ranks
from pytorch_accelerated.ranks.sharding import Shard, is_sharded
from pytorch_accelerated.ranks.wrappers import bare_model
from pytorch_accelerated.states.optimizers import (
    checked_optimizer_state,
    load_optimizer_state,
    mismatch,
    read_optimizer_file,
)
from pytorch_accelerated.states.portable import load_portable
from pytorch_accelerated.states.state_folder import read_state
from pytorch_accelerated.states.training_state import (
    TRAINING_WEIGHTS,
    as_module,
    held_states,
    key_of_state,
    with_difference,
)
from pytorch_accelerated.states.weights import canonical_state_dict, check_canonical, load_canonical, loads_its_own_way

if TYPE_CHECKING:
    from pytorch_accelerated.loop.context import Context, Parts

_UNCHECKED = ("torch.", "timm.")  # objects from these packages load whatever they are given

Load = tuple[str, Any, Any]
"""A name for messages, an object with `load_state_dict`, and its state."""


def load_run(
    context: Context,
    folder: Path,
    *,
    restores_position: bool,
    skipped_weights: Collection[str] = (),
    read: tuple[dict[str, Any], dict[str, Any]] | None = None,
) -> dict[str, Any]:
    """Load the state in `folder` into a run and its objects. Must be called by all ranks.

    Everything is read and verified before anything is changed. Generators come last, since restoring other objects may
    draw from them.

    Args:
        context, folder: where to load into, and from.
        restores_position: whether to restore the position of the training loader.
        skipped_weights: names in the model's state that the folder need not have; the live values stay.
        read: the contents of the folder, if this rank has read it already.

    Returns:
        `extra`, as it was given to `save_run`.

    Raises:
        InvalidCheckpointError: if the folder is damaged or belongs to another model or optimizer.
    """
    parts, ranks, model = context.parts, context.parts.ranks, bare_model(context.parts.model)
    held, reports = held_parts(context.holder), context.parts.reports
    without = ["optimizer"] if parts.optimizer is None and not context.control.is_at_work else []  # to evaluate
    contents, by_rank, states, modules = ranks.do_on_all(
        lambda: _read_run(parts, held, folder, without, skipped_weights, read)
    )
    saved = contents["run"]
    if hasattr(parts.scheduler, "is_continuation_from_checkpoint") and contents["scheduler"] is not None:
        contents["scheduler"]["is_resumed"] = True  # else a `WSDLrScheduler` would start over
    position = RunState.from_state_dict(saved["run_state"], saved.get("totals"))
    if restores_position:  # first, because a user's class may refuse its state
        streams = [state.get("stream") for state in by_rank]
        restore_stream(parts.loaders.train, streams, ranks, run_state=position, source=folder)

    def load_weights() -> None:
        # A module that overrides how it loads may refuse its state, so it comes before those that can't.
        for module, state in sorted(modules, key=lambda pair: not loads_its_own_way(pair[0])):
            load_canonical(module, state, may_lack=skipped_weights if module is model else ())

    load_states(states, load_weights, parts.optimizer, source=folder, ranks=ranks)
    # All objects have accepted their states; what is left is the run's own.
    parts.mode = OptimizerMode(optimizers_of(context.holder, held).values())
    parts.mode.take_over(is_training=saved.get("has_training_weights", position.phase is RunPhase.TRAINING))
    reports.gradient_norms.load_state_dict(by_rank[0]["gradient_norms"])  # the same on all ranks
    if context.asked.given.lanes is not None:  # the first rank has all losses; generators are alike
        if ranks.is_first:
            reports.losses.load_state_dict(by_rank[0]["losses"])
        restore_generator_states(by_rank[0]["generators"])
    elif len(by_rank) == ranks.count:
        if parts.prepared is not None and parts.prepared.gradient_order is not None:
            parts.prepared.gradient_order.repeat(saved.get("gradient_order", ()))  # older states have none
        reports.losses.load_state_dict(by_rank[ranks.index]["losses"])
        restore_generator_states(by_rank[ranks.index]["generators"])
    elif ranks.is_first:  # losses are summed over the ranks, so one of them may have all
        for state in by_rank:
            reports.losses.add_state_dict(state["losses"])
    if reports.recorder is not None and saved.get("recorder") is not None:  # older states have none
        reports.recorder.load_state_dict(saved["recorder"])
    parts.state, context.asked.epochs_before = position, saved["epochs_before_run"]
    return contents["extra"]  # type: ignore[no-any-return]


def _read_run(
    parts: Parts,
    held: Mapping[str, Any],
    folder: Path,
    without: Collection[str],
    skipped_weights: Collection[str],
    read: tuple[dict[str, Any], dict[str, Any]] | None,
) -> tuple[dict[str, Any], list[dict[str, Any]], list[Load], list[tuple[nn.Module, Any]]]:
    """The parts, those that ranks have for themselves, and the states of objects and of modules.

    Verified as far as possible before anything is changed; where states of ranks differ, they are this rank's.
    """
    optimizer, model = parts.optimizer, bare_model(parts.model)
    facts, contents = read or read_state(folder, make_target=_targets(model, optimizer), without=without)
    if "optimizer" not in contents:
        contents["optimizer"] = None if without else read_optimizer_file(folder)
    if TRAINING_WEIGHTS in contents:
        contents["model"] = contents.pop(TRAINING_WEIGHTS)
    with explained_loading("The run", folder):  # something else, or another version, may have written the folder
        RunState.from_state_dict(contents["run"]["run_state"], contents["run"].get("totals"))
        by_rank = [contents[f"rank_{rank}"] for rank in range(facts["ranks"])]
        for own in by_rank:
            check_generator_states(own["generators"])
    _take_own_states(contents, by_rank, parts.ranks)
    # Another model has other parameters, so its optimizer doesn't fit either; the model is what the error should name.
    check_canonical(model, contents["model"], may_lack=skipped_weights)
    if (optimizer is None) != (contents["optimizer"] is None):
        raise InvalidCheckpointError(
            f"Only one of the training state {folder} and this trainer has an optimizer. Make the trainer as it was "
            "when the state was saved, or use another state."
        )
    pairs = [
        (optimizer, contents["optimizer"]),
        (parts.scheduler, contents["scheduler"]),
        (parts.accelerator.scaler, contents["scaler"] or None),
    ]
    states = checked_states(pairs, source=folder)
    states.append(("The run history", parts.history, contents["run"]["history"]))
    for callback in parts.callbacks:
        state = _saved_state(callback, parts.callbacks, contents["callbacks"])
        if state is not None:
            states.append((type(callback).__name__, callback, state))
    objects, modules = _checked_held(held, contents["held"], source=folder, warns=parts.ranks.is_first)
    return contents, by_rank, [*states, *objects], [(model, contents["model"]), *modules]


def _saved_state(callback: Any, callbacks: Iterable[Any], saved: Mapping[str, Any]) -> Any:
    """The saved state of a callback; None if there is none.

    The state of one that writes to a file is found under another path, too, if nothing but paths has changed: each job
    of a run that is stopped and resumed, and each branch, may have a folder of its own. Two of a kind are told apart by
    the names of their files.
    """
    if not hasattr(callback, "load_state_dict"):
        return None
    key, kind = key_of_state(callback), f"{type(callback).__name__}("
    if key in saved or not getattr(callback, "is_told_apart_by_path", False):
        return saved.get(key)
    keys = {key_of_state(each) for each in callbacks}
    left = [other for other in saved if other.startswith(kind) and other not in keys]
    alike = [other for other in keys if other.startswith(kind) and other not in saved]
    if len(alike) > 1:
        left, alike = ([each for each in some if Path(each).name == Path(key).name] for some in (left, alike))
    return saved[left[0]] if len(left) == len(alike) == 1 else None


def _checked_held(
    held: Mapping[str, Any], states: Mapping[str, Any], *, source: object, warns: bool
) -> tuple[list[Load], list[tuple[nn.Module, Any]]]:
    """What the trainer holds besides model, optimizer and scheduler, with `states`: first objects, then modules.

    Raises:
        InvalidCheckpointError: if a part does not exist any more, or is another one.
    """
    gone = [path for path in states if path not in held]
    if gone and warns:  # the first rank's states are those of all, whatever the others hold
        raise InvalidCheckpointError(
            f"The run that saved {source} had {', '.join(gone)}, which this trainer and its loss function do not have. "
            "Nothing was loaded. Make the trainer as it was, before the run starts."
        )
    new = [path for path in held_states(held, warns=False) if path not in states]
    if new and warns:
        warnings.warn(
            f"The training state {source} has no values of {', '.join(new)}: they stay as they are.", stacklevel=2
        )
    objects, modules = [], []
    for path, part in held.items():
        if path not in states:
            continue
        module = as_module(part)
        try:
            if module is None:
                objects.append((path, part, _checked_state(part, states[path], source=source)))
            else:
                check_canonical(module, states[path])
                modules.append((module, states[path]))
        except InvalidCheckpointError as error:
            raise InvalidCheckpointError(f"{path}: {error}") from error
    return objects, modules


def _take_own_states(parts: dict[str, Any], by_rank: list[dict[str, Any]], ranks: Ranks) -> None:
    """Replace rank 0's history, callbacks and held parts by this rank's; nothing if the number of ranks differs."""
    parts.setdefault("held", {})  # older states have none, nor does a run that holds nothing
    if len(by_rank) == ranks.count:
        own = by_rank[ranks.index]
        parts["run"]["history"] = with_difference(parts["run"]["history"], own.get("history", []))
        for part in ("callbacks", "held"):
            for key, difference in own.get(part, {}).items():
                parts[part][key] = with_difference(parts[part].get(key), difference)
        return
    differing = sorted({key for own in by_rank for part in ("callbacks", "held") for key in own.get(part, {})})
    differing += ["the run history"] * any("history" in own for own in by_rank)
    if differing and ranks.is_first:
        warnings.warn(
            f"The {len(by_rank)} processes that saved this training state had different states of "
            f"{', '.join(differing)}. With another number ({ranks.count}) each of them loads those of the first "
            "one.",
            stacklevel=2,
        )


def _targets(model: Any, optimizer: Any) -> Callable[[str, torch.Size, torch.dtype], Any]:
    """A function that makes targets for tensors, sharded as in this run, so that no rank holds a whole state."""
    values = canonical_state_dict(model)
    groups = [] if optimizer is None else optimizer.param_groups
    parameters = dict(enumerate(each for group in groups for each in group["params"]))

    def make(name: str, shape: torch.Size, dtype: torch.dtype) -> Any:
        part, _, path = name.partition("/")
        live = values.get(path) if part in ("model", TRAINING_WEIGHTS) else None
        if part == "optimizer" and (match := re.match(r"state\[(\d+)\]", path)):
            live = parameters.get(int(match[1]))
        if (piece := getattr(optimizer, "piece_of", lambda _: None)(live)) is not None:
            live = piece
        if isinstance(live, Shard) and live.shape == shape:
            return dataclasses.replace(live, part=torch.empty(live.part.shape, dtype=dtype))
        if live is not None and is_sharded(live) and live.shape == shape:
            return torch.empty_like(live, dtype=dtype, requires_grad=False)
        return torch.empty(shape, dtype=dtype)

    return make


def load_states(
    states: Iterable[Load],
    load_weights: Callable[[], None],
    optimizer: Any,
    *,
    source: object,
    ranks: Ranks | None = None,
) -> None:
    """Load states that were checked as far as possible. If one fails all the same, everything is as before.

    No tensor is copied for that: optimizers make a new state when they load one, so the old one need only be kept.
    The weights come last, because they are changed in place.

    Args:
        states: what `checked_states` returned, and others.
        load_weights: loads the weights.
        optimizer: whose settings schedulers may change when they load their states.
        source: where the states come from, for messages.
        ranks: those that all undo the load if one of them fails.

    Raises:
        InvalidCheckpointError: names the object that cannot load its state.
    """
    with kept(only_if_it_fails=True) as undo:

        def load() -> None:
            if optimizer is not None:
                undo.optimizer(optimizer, steps=False)
            for name, target, state in states:
                with explained_loading(name, source):
                    if hasattr(target, "param_groups"):
                        undo.optimizer(target, steps=False)
                        load_optimizer_state(target, state)
                    else:
                        undo.object(target)
                        target.load_state_dict(state)
            load_weights()

        load() if ranks is None else ranks.do_on_all(load)


def checked_states(pairs: Iterable[tuple[Any, Any]], *, source: object) -> list[Load]:
    """Optimizers, schedulers and scalers with the states that they will load; without those that have none.

    Raises:
        InvalidCheckpointError: if a state from `source` was saved by another kind of object. Most of them load whatever
            they are given, and fail at the next step, or never.
    """
    return [
        (type(target).__name__, target, _checked_state(target, state, source=source))
        for target, state in pairs
        if target is not None and state is not None
    ]


def _checked_state(target: Any, state: Any, *, source: object) -> Any:
    """The state of an optimizer, a scheduler or the like, see `checked_states`."""
    if hasattr(target, "param_groups"):
        return checked_optimizer_state(target, state, source=source)
    live = target.state_dict()
    problem = mismatch(live, state, "its state")
    if problem is None and type(target).__module__.startswith(_UNCHECKED):
        unknown = sorted(str(name) for name in state if name not in live)
        missing = sorted(str(name) for name in live if name not in state)
        if unknown and missing:
            problem = f"it has {', '.join(unknown)}, but not {', '.join(missing)}: another kind wrote it"
    if problem is not None:
        raise InvalidCheckpointError(
            f"The state of the {type(target).__name__} in {source} cannot be loaded: {problem}. Nothing was changed. "
            "Make it as it was."
        )
    return state


def load_checkpoint(
    path: str | Path, model: Any, optimizer: Any, scheduler: Any, *, loads_optimizer: bool
) -> dict[str, Any]:
    """Load a file that `Trainer.save_checkpoint` wrote. Returns all its entries.

    Args:
        path: the file.
        model: the bare module.
        optimizer: its optimizer, whose settings a scheduler may change when it loads its state.
        scheduler: what loads the scheduler's state, if there is one.
        loads_optimizer: whether the optimizer loads its state.

    Raises:
        MissingCheckpointError: a FileNotFoundError, if the file does not exist.
        InvalidCheckpointError: if the file is damaged or belongs to another model or optimizer; then nothing is
            changed.
    """
    checkpoint = load_portable(path)
    if "model_state_dict" not in checkpoint:
        raise InvalidCheckpointError(
            f"{path} has no 'model_state_dict', only {', '.join(map(repr, checkpoint)) or 'nothing'}. "
            "Load a file that `save_checkpoint` wrote."
        )
    weights = checkpoint["model_state_dict"]
    check_canonical(model, weights)
    pairs = [
        (optimizer if loads_optimizer else None, checkpoint.get("optimizer_state_dict")),
        (scheduler, checkpoint.get("scheduler_state_dict")),
    ]
    states = checked_states(pairs, source=path)
    load_states(states, lambda: load_canonical(model, weights), optimizer, source=path)
    return checkpoint
