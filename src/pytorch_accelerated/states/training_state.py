"""The complete state of a training run, saved to a state folder and loaded from it.

`_shared_parts` and `_own_state` list the contents of each part; `state_folder` writes and reads the folder.

Of objects whose states are equal, or nearly equal, on all ranks, rank 0's state is stored whole. Every other rank
stores only its differences: a list of ``[path, value]``, where a path is a list of keys of nested dicts. An average of
weights, for example, costs each further rank its own batch statistics, not another copy of the weights.
"""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import re
import warnings
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from pytorch_accelerated.data.resuming import data_facts, restore_stream, stream_state
from pytorch_accelerated.errors import CheckpointError, InvalidCheckpointError, explained_loading
from pytorch_accelerated.facts.run_state import RunPhase, RunState
from pytorch_accelerated.facts.seeding import check_generator_states, generator_states, restore_generator_states
from pytorch_accelerated.ranks.held import held_parts, optimizers_of
from pytorch_accelerated.ranks.keeping import kept
from pytorch_accelerated.ranks.preparation import OptimizerMode
from pytorch_accelerated.ranks.ranks import Ranks
from pytorch_accelerated.ranks.sharding import has_shards, is_sharded
from pytorch_accelerated.ranks.wrappers import bare_model
from pytorch_accelerated.record.history import RunHistory, with_some_records
from pytorch_accelerated.record.values import on_host
from pytorch_accelerated.states.codec import Encoded, encode
from pytorch_accelerated.states.formats import chunks, dump_json
from pytorch_accelerated.states.loading import (
    check_same_kind,
    checked_states,
    held_modules,
    held_objects,
    held_states,
    load_states,
)
from pytorch_accelerated.states.optimizers import (
    check_optimizer_state,
    read_optimizer_file,
    with_callables,
    without_callables,
)
from pytorch_accelerated.states.portable import save_portable
from pytorch_accelerated.states.publish import StagedFolder
from pytorch_accelerated.states.state_folder import BackgroundWriter, encode_parts, read_state, write_encoded
from pytorch_accelerated.states.weights import (
    canonical_state_dict,
    check_canonical,
    load_canonical,
    loads_its_own_way,
)

if TYPE_CHECKING:
    from pytorch_accelerated.loop.context import Context

TRAINING_WEIGHTS = "training_weights"
"""The part with the weights of the model where files of others in the folder have the name of the part ``model``."""
Difference = list[list[Any]]
"""Entries ``[path, value]``."""
_MOST_CHARACTERS = 1000  # of what describes a module


@dataclasses.dataclass(frozen=True)
class KeptStates:
    """States from an earlier moment, to be saved instead of those that their objects have now.

    Attributes:
        callbacks: those of some callbacks, by state key.
        history: of the run history.
        recorder: of the recorder of step records.
        stream: the position in the training stream.
        generators: of the random generators.
    """

    callbacks: dict[str, Any]
    history: dict[str, Any]
    recorder: dict[str, Any] | None
    stream: dict[str, Any] | None
    generators: dict[str, Any]


def frozen(run: Context, stateful: Iterable[Any]) -> Context:
    """The run as it is now, but for model, optimizer and scheduler. Must be called by all ranks.

    Args:
        run: the run.
        stateful: the callbacks whose states may change.
    """
    stateful = [one for one in stateful if hasattr(one, "state_dict")]
    earlier = KeptStates(
        callbacks={key_of_state(one): copy.deepcopy(one.state_dict()) for one in stateful},
        history=storable_history(run.history, run.ranks),
        recorder=None if run.recorder is None else run.recorder.state_dict(run.state.samples_in_epoch),
        stream=copy.deepcopy(_stream_of(run)),
        generators=generator_states(),
    )
    counts = dataclasses.replace(run.state)
    losses, norms = run.losses.copy(), run.gradient_norms.copy()
    return dataclasses.replace(run, state=counts, losses=losses, gradient_norms=norms, kept=earlier)


def save_run(
    run: Context,
    folder: Path | StagedFolder,
    extra: dict[str, Any],
    writer: BackgroundWriter | None = None,
    *,
    ranks_of_writer: Callable[[], Ranks] | None = None,
    skipped_weights: Collection[str] = (),
    weights_part: str | None = "model",
    has_optimizer_file: bool = False,
) -> None:
    """Write the state of a run to `folder`. Must be called by all ranks.

    Rank 0 writes. Each rank writes its own parts of sharded tensors, and rank 0 publishes when all have done so.

    Args:
        run: what to save.
        folder: where to, see `write_encoded`.
        extra: additional entries.
        writer: writes the state in the background, if given.
        ranks_of_writer: makes the ranks with a process group for `writer`, for sharded models.
        skipped_weights: names in the model's state that are left out, because training does not change them.
        weights_part: the part for the weights of the model; None if files in `folder` hold them.
        has_optimizer_file: whether `OPTIMIZER_FILE` in `folder` holds the optimizer's state.

    Raises:
        CheckpointError: on every rank, if something cannot be stored or written, or if `writer` could not write the
            state before this one.
    """
    ranks = run.ranks
    callbacks = _callback_states(run)
    held_now = held_parts(run.holder)
    held = held_states(held_now, warns=ranks.is_first)
    everyones = ranks.exchange({**_own_state(run), **_own_differences(run, callbacks, held)})
    latest = filter(None, map(run.history.latest_record, run.history.get_metric_names()))
    facts = {
        "metrics": {
            each.name: float(each.value)
            for each in latest
            if each.is_scalar and each.update == run.history.updates_done
        },
        "updates": run.state.updates,
        "epochs": run.state.epochs,
        "samples_in_epoch": 0 if run.state.phase is RunPhase.EPOCH_CLOSED else run.state.samples_in_epoch,
        "ranks": ranks.count,
        "seed": run.seed,
        "data": data_facts(train=run.loaders.train, eval=run.loaders.eval),
        "evaluation_sets": data_facts(**run.loaders.eval_by_name),
    }
    if run.left_out:
        facts["left_out"] = [dataclasses.asdict(each) for each in run.left_out]
    write: Callable[..., None] = write_encoded if writer is None else writer.write

    def encoded() -> dict[str, Encoded]:
        parts = {**_shared_parts(run, without_optimizer=has_optimizer_file), "callbacks": callbacks, "extra": extra}
        if held:
            parts["held"] = held
        for name in skipped_weights:
            parts["model"].pop(name, None)
        weights = parts.pop("model")
        if weights_part is not None:
            parts[weights_part] = weights
        parts.update({f"rank_{rank}": state for rank, state in enumerate(everyones)})
        return encode_parts(parts)

    if any(map(has_shards, (run.model, *held_now.values()))):
        own_ranks = ranks if writer is None or ranks_of_writer is None else ranks_of_writer()
        write(folder, facts, ranks.do_on_all(encoded), own_ranks)
    else:
        ranks.do_on_first(lambda: write(folder, facts, encoded()))


def load_run(
    run: Context,
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
        run, folder: where to load into, and from.
        restores_position: whether to restore the position of the training loader.
        skipped_weights: names in the model's state that the folder need not have; the live values stay.
        read: the contents of the folder, if this rank has read it already.

    Returns:
        `extra`, as it was given to `save_run`.

    Raises:
        InvalidCheckpointError: if the folder is damaged or belongs to another model or optimizer.
    """
    ranks = run.ranks
    parts, by_rank, optimizer_state, held = ranks.do_on_all(lambda: _read_run(run, folder, skipped_weights, read))
    if hasattr(run.scheduler, "is_continuation_from_checkpoint") and parts["scheduler"] is not None:
        parts["scheduler"]["is_resumed"] = True  # else a `WSDLrScheduler` would begin anew
    run_state = RunState.from_state_dict(parts["run"]["run_state"], parts["run"].get("totals"))
    if restores_position:  # first, because a user's class may refuse its state
        streams = [state.get("stream") for state in by_rank]
        restore_stream(run.loaders.train, streams, ranks, run_state=run_state, source=folder)
    others = [*_others(run, parts), *held_objects(held)]
    model = bare_model(run.model)
    modules = [(model, parts["model"]), *held_modules(held)]
    modules.sort(key=lambda pair: not loads_its_own_way(pair[0]))  # one that may fail comes first

    def load_weights() -> None:
        for module, state in modules:
            load_canonical(module, state, may_lack=skipped_weights if module is model else ())

    with kept(only_if_it_fails=True) as undo:

        def load() -> None:
            load_states(load_weights, run.optimizer, optimizer_state, others, undo, source=folder)

        ranks.do_on_all(load)
    order = None if run.prepared is None else run.prepared.gradient_order
    if order is not None and len(by_rank) == ranks.count:
        order.repeat(parts["run"].get("gradient_order", ()))  # older states have none
    run.mode = OptimizerMode(optimizers_of(run.holder, held_parts(run.holder)).values())
    run.mode.take_over(is_training=parts["run"].get("has_training_weights", run_state.phase is RunPhase.TRAINING))
    run.gradient_norms.load_state_dict(by_rank[0]["gradient_norms"])  # the same on all ranks
    if len(by_rank) == ranks.count:
        own = by_rank[ranks.index]
        run.losses.load_state_dict(own["losses"])
        restore_generator_states(own["generators"])
    elif ranks.is_first:  # the sum over the ranks counts
        for state in by_rank:
            run.losses.add_state_dict(state["losses"])
    recorded = parts["run"].get("recorder")  # older states have none
    if run.recorder is not None and recorded is not None:
        run.recorder.load_state_dict(recorded)
    run.state, run.epochs_before = run_state, parts["run"]["epochs_before_run"]
    return parts["extra"]  # type: ignore[no-any-return]


def save_parts(path: str | Path, ranks: Ranks, folder: Path, names: Collection[str], extra: Mapping[str, Any]) -> None:
    """Write parts of a training state to a portable file, as `loading.save_checkpoint` writes those of a run.

    Must be called by all ranks; the first of each node writes.

    Args:
        path: of the file.
        ranks: the processes.
        folder: of the state.
        names: ``model``, and ``optimizer`` and ``scheduler`` if they are wanted.
        extra: further entries.

    Raises:
        InvalidCheckpointError: if the state is damaged, or not there any more.
    """

    def write() -> None:
        if ranks.is_first_of_node:
            parts = read_state(folder, names)[1].items()
            save_portable(path, {**{f"{name}_state_dict": part for name, part in parts if part is not None}, **extra})

    ranks.do_on_all(write)


def _read_run(
    run: Context,
    folder: Path,
    skipped_weights: Collection[str],
    read: tuple[dict[str, Any], dict[str, Any]] | None,
) -> tuple[dict[str, Any], list[dict[str, Any]], Any, list[tuple[str, Any, Any]]]:
    """Parts, those that ranks have for themselves, the optimizer's state, and those of held parts.

    Verified as far as possible before anything is changed; where states of ranks differ, they are this rank's.
    """
    without = ["optimizer"] if run.optimizer is None and not run.is_at_work else []  # to evaluate
    facts, parts = read or read_state(folder, make_target=_targets(run), without=without)
    if "optimizer" not in parts:
        parts["optimizer"] = None if without else read_optimizer_file(folder)
    if TRAINING_WEIGHTS in parts:
        parts["model"] = parts.pop(TRAINING_WEIGHTS)
    with explained_loading("The run", folder):  # something else, or another version, may have written the folder
        RunState.from_state_dict(parts["run"]["run_state"], parts["run"].get("totals"))
        by_rank = [parts[f"rank_{rank}"] for rank in range(facts["ranks"])]
        for own in by_rank:
            check_generator_states(own["generators"])
    _take_states_of_this_rank(run, parts, by_rank)
    # Before the optimizer, which another model makes another one, too.
    check_canonical(bare_model(run.model), parts["model"], may_lack=skipped_weights)
    if (run.optimizer is None) != (parts["optimizer"] is None):
        raise InvalidCheckpointError(
            f"Only one of the training state {folder} and this trainer has an optimizer. Make the trainer as it was "
            "when the state was saved, or use another state."
        )
    optimizer_state = parts["optimizer"]
    if optimizer_state is not None:
        optimizer_state = with_callables(optimizer_state, run.optimizer)
        check_optimizer_state(run.optimizer, optimizer_state, source=folder)
    for _, target, state in _scheduler_and_scaler(run, parts):
        check_same_kind(target, state, source=folder)
    held = checked_states(held_parts(run.holder), parts["held"], source=folder, is_first=run.ranks.is_first)
    return parts, by_rank, optimizer_state, held


def _others(run: Context, parts: dict[str, Any]) -> list[tuple[str, Any, Any]]:
    """Name, object and state of what loads a state besides model, optimizer and held parts."""
    stateful = [one for one in run.callbacks if hasattr(one, "load_state_dict")]
    saved = [(one, parts["callbacks"].get(key_of_state(one))) for one in stateful]
    return [
        *_scheduler_and_scaler(run, parts),
        ("The run history", run.history, parts["run"]["history"]),
        *((type(callback).__name__, callback, state) for callback, state in saved if state is not None),
    ]


def _scheduler_and_scaler(run: Context, parts: dict[str, Any]) -> list[tuple[str, Any, Any]]:
    scheduler, scaler = run.scheduler, run.accelerator.scaler
    found = []
    if scheduler is not None and parts["scheduler"] is not None:
        found.append((type(scheduler).__name__, scheduler, parts["scheduler"]))
    if scaler is not None and parts["scaler"]:
        found.append((type(scaler).__name__, scaler, parts["scaler"]))
    return found


def _targets(run: Context) -> Callable[[str, torch.Size, torch.dtype], torch.Tensor]:
    """A function that makes targets for tensors, sharded as in this run, so that no rank holds a whole state."""
    values = canonical_state_dict(bare_model(run.model))
    groups = [] if run.optimizer is None else run.optimizer.param_groups
    parameters = dict(enumerate(each for group in groups for each in group["params"]))

    def make(name: str, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        part, _, path = name.partition("/")
        live = values.get(path) if part in ("model", TRAINING_WEIGHTS) else None
        if part == "optimizer" and (match := re.match(r"state\[(\d+)\]", path)):
            live = parameters.get(int(match[1]))
        if live is not None and is_sharded(live) and live.shape == shape:
            return torch.empty_like(live, dtype=dtype, requires_grad=False)
        return torch.empty(shape, dtype=dtype)

    return make


def _shared_parts(run: Context, *, without_optimizer: bool) -> dict[str, Any]:
    """The parts that are the same on every rank."""
    optimizer, scheduler, scaler = run.optimizer, run.scheduler, run.accelerator.scaler
    loss = getattr(run.holder, "loss_func", None)
    order = None if run.prepared is None else run.prepared.gradient_order
    parts: dict[str, Any] = {
        "model": canonical_state_dict(bare_model(run.model)),
        "scheduler": None if scheduler is None else scheduler.state_dict(),
        "scaler": None if scaler is None else scaler.state_dict(),
        "run": {
            "run_state": run.state.state_dict(),
            "totals": run.state.totals,
            "history": _history_state(run),
            "epochs_before_run": run.epochs_before,
            "config": None if run.config is None else run.config.to_dict(),
            "described": {**_described("model", bare_model(run.model)), **_described("loss", loss)},
            "recorder": _recorder_state(run),
            "gradient_order": [] if order is None else list(order.names),
        },
    }
    if run.mode.has_modes:
        parts["run"]["has_training_weights"] = run.mode.is_training
    if run.state.is_cut:
        parts["run"]["ended_history"] = storable_history(run.history, run.ranks)  # with the end of the cut epoch
    if not without_optimizer:
        parts["optimizer"] = None if optimizer is None else without_callables(optimizer.state_dict())
    return parts


def _described(name: str, part: Any) -> dict[str, str]:
    """What a module and each in it is, or another object, in words by path. It says nothing about weights."""
    inner = part.named_modules() if isinstance(part, nn.Module) else [("", part)]
    return {f"{name}.{path}".rstrip("."): _in_words(each) for path, each in inner}


def _in_words(part: Any) -> str:
    try:
        text = f"{type(part).__name__}({part.extra_repr()})" if isinstance(part, nn.Module) else repr(part)
    except Exception:  # of the user's own class, which is no reason to save nothing
        text = type(part).__name__
    return re.sub(r" at 0x[0-9a-f]+", "", text)[:_MOST_CHARACTERS]


def _callback_states(run: Context) -> dict[str, Any]:
    """The states of the callbacks by state key. Must be called by all ranks: some need communication."""
    before = {} if run.kept is None else run.kept.callbacks
    stateful = {key_of_state(one): one for one in run.callbacks if hasattr(one, "state_dict")}
    return {key: before[key] if key in before else one.state_dict() for key, one in stateful.items()}


def _history_state(run: Context) -> dict[str, Any]:
    return storable_history(run.history, run.ranks) if run.kept is None else run.kept.history


def _recorder_state(run: Context) -> dict[str, Any] | None:
    if run.kept is not None or run.recorder is None:
        return None if run.kept is None else run.kept.recorder
    return run.recorder.state_dict(run.state.samples_in_epoch)


def _own_differences(run: Context, callbacks: dict[str, Any], held: dict[str, Any]) -> dict[str, Any]:
    """How this rank's callbacks, history and held parts differ from rank 0's, if they do."""
    ranks = run.ranks
    histories = {} if ranks.count == 1 else {"history": _history_state(run)}
    own = {
        "callbacks": differences_from_first(ranks, callbacks, path="callbacks"),
        "held": differences_from_first(ranks, held, path="held"),
        **differences_from_first(ranks, histories, path="run"),
    }
    return {name: difference for name, difference in own.items() if difference}


def _take_states_of_this_rank(run: Context, parts: dict[str, Any], by_rank: list[dict[str, Any]]) -> None:
    """Replace those of the history, the callbacks and held parts; nothing if the number of ranks differs."""
    parts.setdefault("held", {})  # older states have none, nor those of a run in which nothing is held
    if len(by_rank) == run.ranks.count:
        own = by_rank[run.ranks.index]
        parts["run"]["history"] = with_difference(parts["run"]["history"], own.get("history", []))
        for part in ("callbacks", "held"):
            for key, difference in own.get(part, {}).items():
                parts[part][key] = with_difference(parts[part].get(key), difference)
        return
    differing = sorted({key for own in by_rank for part in ("callbacks", "held") for key in own.get(part, {})})
    differing += ["the run history"] * any("history" in own for own in by_rank)
    if differing and run.ranks.is_first:
        warnings.warn(
            f"The {len(by_rank)} processes that saved this training state had different states of "
            f"{', '.join(differing)}. With another number ({run.ranks.count}) each of them loads those of the first "
            "one.",
            stacklevel=2,
        )


def _own_state(run: Context) -> dict[str, Any]:
    """The state that every rank has for itself."""
    return {
        "generators": generator_states() if run.kept is None else run.kept.generators,
        "losses": run.losses.state_dict(),
        "gradient_norms": run.gradient_norms.state_dict(),
        "stream": _stream_of(run) if run.kept is None else run.kept.stream,
    }


def _stream_of(run: Context) -> dict[str, Any] | None:
    """How the stream that this rank trains on is divided, and its position in it, if they are known."""
    state = stream_state(run.loaders.train)
    if state is not None and "borrowed" in state:
        try:
            encode(state["borrowed"], path="the last batch")
        except CheckpointError:
            state["borrowed"] = None  # only a rank without further batches would need it
    return state


def key_of_state(callback: Any) -> str:
    """The name of a callback's state."""
    return getattr(callback, "state_key", None) or type(callback).__name__


def differences_from_first(ranks: Ranks, states: Mapping[str, Any], *, path: str) -> dict[str, Difference]:
    """The differences of this rank's `states` from rank 0's, by name, without equal ones. Must be called by all ranks.

    Ranks compare checksums, so equal values are never sent. Sharded tensors count as equal: the training state has the
    pieces of all ranks anyway. A state that rank 0 does not have differs as a whole.

    Raises:
        CheckpointError: on every rank, if a state of any rank cannot be stored; calls `states` by the name `path`.
    """
    if ranks.count == 1:
        return {}

    def own_digests() -> dict[str, Any]:
        encode(dict(states), path=path)  # raises, with the places of all values that cannot be stored
        return {name: _digest(state) for name, state in states.items()}

    digests = ranks.do_on_all(own_digests)
    first = ranks.from_first(digests)
    differences = {name: list(_differing(state, digests[name], first.get(name), [])) for name, state in states.items()}
    return {name: difference for name, difference in differences.items() if difference}


def with_difference(state: Any, difference: Difference) -> Any:
    """Rank 0's `state` with another rank's difference applied."""
    for path, value in difference:
        state = _replaced(state, path, value)
    return state


def _replaced(state: Any, path: list[str], value: Any) -> Any:
    if not path:
        return value
    changed = copy.copy(state)  # also the versions in the state dict of a module
    changed[path[0]] = _replaced(state[path[0]], path[1:], value)
    return changed


def _digest(value: Any) -> Any:
    """A checksum, or a dict of them where `value` is a dict."""
    if type(value) in (dict, OrderedDict) and all(type(key) is str for key in value):
        return {key: _digest(item) for key, item in value.items()}
    encoded = encode(value, path="")
    if encoded.sharded:
        return b"sharded"
    checksum = hashlib.sha256(dump_json(encoded.structure))
    for chunk in chunks(encoded.tensors):
        checksum.update(chunk)
    return checksum.digest()


def _differing(value: Any, own: Any, first: Any, path: list[str]) -> Iterator[list[Any]]:
    if own == first:
        return
    if isinstance(own, dict) and isinstance(first, dict) and own.keys() == first.keys():
        for key, item in value.items():
            yield from _differing(item, own[key], first[key], [*path, key])
    else:
        yield [path, on_host(value)]  # it is sent to other ranks, which may not see this one's device


def storable_history(history: RunHistory, ranks: Ranks) -> dict[str, Any]:
    """The state of a history without values that a training state cannot hold.

    The first rank warns once about each metric with such values.
    """
    state = history.state_dict()
    records = state.get("records")
    if not isinstance(records, Mapping) or not records.get("objects"):
        return state  # a user's own history, or nothing but numbers
    reasons: dict[str, str] = {}
    keep = [True] * len(records["table"])
    for index, value in records["objects"]:
        name = records["names"][int(records["table"][index, 0])]
        try:
            encode(value, path=name)
        except CheckpointError as error:
            reasons.setdefault(name, str(error).splitlines()[1].strip())
            keep[index] = False
    new = {name: reason for name, reason in reasons.items() if name not in history.names_not_saved}
    history.names_not_saved.update(new)
    if new and ranks.is_first:
        warnings.warn(
            "Training states leave out values of "
            + ", ".join(f"the metric {name!r} ({reason})" for name, reason in new.items())
            + ". The run and its history keep them. To have them in states, record plain values, tensors or arrays.",
            stacklevel=2,
        )
    return with_some_records(state, keep) if reasons else state
