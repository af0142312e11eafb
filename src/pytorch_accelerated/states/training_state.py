"""The complete state of a training run on its way to the disk. `loading` takes the way back.

`moment_of`, `_parts_of_run` and `save_run` say what a state contains; `state_folder` writes the folder.

Rank 0 stores its callbacks, held parts and history whole, because they are equal, or nearly equal, on all ranks. Every
other rank stores only its differences: a list of ``[path, value]``, where a path is a list of keys of nested dicts. An
average of weights, for example, costs each further rank its own batch statistics, not another copy of the weights.
"""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import re
import warnings
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from pytorch_accelerated.data.resuming import data_facts, stream_state
from pytorch_accelerated.errors import CheckpointError
from pytorch_accelerated.facts.run_state import RunPhase, RunState
from pytorch_accelerated.facts.seeding import generator_states
from pytorch_accelerated.ranks.held import held_parts
from pytorch_accelerated.ranks.ranks import Ranks, limit_of_waiting
from pytorch_accelerated.ranks.sharding import has_shards
from pytorch_accelerated.ranks.wrappers import bare_model
from pytorch_accelerated.record.history import RunHistory, with_some_records
from pytorch_accelerated.record.values import on_host
from pytorch_accelerated.states.codec import Encoded, chunks, dump_json, encode
from pytorch_accelerated.states.optimizers import without_callables
from pytorch_accelerated.states.publish import StagedFolder
from pytorch_accelerated.states.state_folder import BackgroundWriter, read_state, write_encoded
from pytorch_accelerated.states.weights import canonical_state_dict

if TYPE_CHECKING:
    from pytorch_accelerated.loop.context import Asked, Context, Parts

TRAINING_WEIGHTS = "training_weights"
"""The name of the part with the model's weights if another library's files in the folder have the name ``model``."""
Difference = list[list[Any]]
"""Entries ``[path, value]``."""
Moment = dict[str, Any]
"""What `moment_of` returns."""
_MOST_CHARACTERS = 1000  # of what describes a module


def moment_of(parts: Parts, *, ended_early: bool = False) -> Moment:
    """Where a run is, and what callbacks and the loop change at events.

    Must be called by all ranks: some callbacks communicate when they are asked for their state. A save takes the moment
    as it is. When an epoch ends before its data, its events are still emitted, and change all of this; the states that
    the run then writes are of the moment before them, so that a resume continues the epoch.

    Args:
        parts: what the run works with.
        ended_early: whether the epoch ends before its data; then nothing in the moment will change any more.

    Returns:
        ``position``, the counts of the run; the states of callbacks, by state key; the states of the run history and of
        the recorder of step records, if there is one; and as ``rank`` what each rank has for itself: the states of its
        random generators and trackers, and how the stream that it trains on is divided, and its position in it, if they
        are known. Weights, optimizer, scheduler, scaler and held parts are read when the state is written.
    """
    # A save encodes these states at once. If the epoch ended early, they must outlive the events of its end, which
    # change them.
    keep: Callable[[Any], Any] = copy.deepcopy if ended_early else lambda value: value
    reports, stream = parts.reports, stream_state(parts.loaders.train)
    if stream is not None and _complaint_about(stream.get("borrowed"), "the last batch"):
        stream["borrowed"] = None  # only a rank without further batches would need it
    return {
        "position": dataclasses.replace(parts.state, is_cut=True) if ended_early else parts.state,
        "callbacks": {
            key_of_state(one): keep(one.state_dict()) for one in parts.callbacks if hasattr(one, "state_dict")
        },
        "history": storable_history(parts.history, parts.ranks),
        "recorder": None if reports.recorder is None else reports.recorder.state_dict(parts.state.samples_in_epoch),
        "rank": {
            "generators": generator_states(),
            "losses": reports.losses.state_dict(),
            "gradient_norms": reports.gradient_norms.state_dict(),
            "stream": keep(stream),
        },
    }


def save_run(
    context: Context,
    folder: Path | StagedFolder,
    extra: dict[str, Any],
    writer: BackgroundWriter | None = None,
    *,
    moment: Moment | None = None,
    skipped_weights: Collection[str] = (),
    weights_part: str | None = "model",
    has_optimizer_file: bool = False,
) -> None:
    """Write the state of a run to `folder`. Must be called by all ranks.

    Rank 0 writes. Each rank writes its own parts of sharded tensors, and rank 0 publishes when all have done so.

    Args:
        context: what to save.
        folder: where to, see `write_encoded`.
        extra: additional entries.
        writer: writes the state in the background, if given.
        moment: an earlier moment of the epoch, from which a resume continues. Default: now.
        skipped_weights: names in the model's state that are left out, because training does not change them.
        weights_part: the part for the weights of the model; None if files in `folder` hold them.
        has_optimizer_file: whether `OPTIMIZER_FILE` in `folder` holds the optimizer's state.

    Raises:
        CheckpointError: on every rank, if something cannot be stored or written, or if `writer` could not write the
            state before this one.
    """
    parts, ranks = context.parts, context.parts.ranks
    moment = moment_of(parts) if moment is None else moment
    held_now = held_parts(context.holder)
    held = held_states(held_now, warns=ranks.is_first)
    # Rank 0 writes everything but shards, so the others send it what only they know: never the model's weights.
    states_of_objects = {"callbacks": moment["callbacks"], "held": held, "run": {"history": moment["history"]}}
    differences = differences_from_first(ranks, states_of_objects) if ranks.count > 1 else {}
    history = differences.pop("run", {})
    per_rank = ranks.exchange({**moment["rank"], **differences, **history})
    facts = _facts_of(parts, context.asked, moment["position"])

    def encoded() -> dict[str, Encoded]:
        # Values that can't be stored are errors here, before anything is on the disk.
        contents = _parts_of_run(parts, context.asked, context.holder, moment)
        contents.update({"callbacks": moment["callbacks"], "extra": extra})
        if held:
            contents["held"] = held
        if not has_optimizer_file:
            contents["optimizer"] = None if parts.optimizer is None else without_callables(parts.optimizer.state_dict())
        if weights_part is not None:
            contents[weights_part] = canonical_state_dict(bare_model(parts.model))
            for name in skipped_weights:
                contents[weights_part].pop(name, None)
        contents.update({f"rank_{rank}": state for rank, state in enumerate(per_rank)})
        return {name: encode(value, path=name) for name, value in contents.items()}

    write: Callable[..., None] = write_encoded if writer is None else writer.write
    if any(map(has_shards, (parts.model, *held_now.values()))) or hasattr(parts.optimizer, "piece_of"):
        if writer is not None:  # the thread exchanges messages while the run does, so it needs a channel of its own
            ranks = Ranks(parts.accelerator, channel="writer", timeout=limit_of_waiting(context.asked.given.timeout))
        write(folder, facts, parts.ranks.do_on_all(encoded), ranks)
    else:
        ranks.do_on_first(lambda: write(folder, facts, encoded()))


def _facts_of(parts: Parts, asked: Asked, position: RunState) -> dict[str, Any]:
    """What the manifest says about the run, so that it can be read without the parts."""
    latest = filter(None, map(parts.history.latest_record, parts.history.get_metric_names()))
    facts: dict[str, Any] = {
        "metrics": {
            each.name: float(each.value)
            for each in latest
            if each.is_scalar and each.update == parts.history.updates_done
        },
        "updates": position.updates,
        "epochs": position.epochs,
        "samples_in_epoch": 0 if position.phase is RunPhase.EPOCH_CLOSED else position.samples_in_epoch,
        "ranks": parts.ranks.count,
        "seed": asked.seed,
        "data": data_facts(train=parts.loaders.train, eval=parts.loaders.eval),
        "evaluation_sets": data_facts(**parts.loaders.eval_by_name),
    }
    if asked.given.lanes is not None:
        facts |= {"lanes": asked.given.lanes, "threads": torch.get_num_threads()}
    if asked.left_out:
        facts["left_out"] = [dataclasses.asdict(each) for each in asked.left_out]
    if asked.branch_of:
        facts["branch_of"] = list(asked.branch_of)
    return facts


def _parts_of_run(parts: Parts, asked: Asked, holder: Any, moment: Moment) -> dict[str, Any]:
    """The parts that are the same on every rank, but for weights and optimizer, which other files may hold."""
    scheduler, scaler = parts.scheduler, parts.accelerator.scaler
    order = None if parts.prepared is None else parts.prepared.gradient_order
    own = {
        "run_state": moment["position"].state_dict(),
        "totals": moment["position"].totals,
        "history": moment["history"],
        "epochs_before_run": asked.epochs_before,
        "config": None if parts.config is None else parts.config.to_dict(),
        "described": _described(model=bare_model(parts.model), loss=getattr(holder, "loss_func", None)),
        "recorder": moment["recorder"],
        "gradient_order": [] if order is None else list(order.names),
    }
    if parts.mode.has_modes:
        own["has_training_weights"] = parts.mode.is_training
    if moment["position"].is_cut:
        # `history` ends before the events of the early end. This one has their metrics, for readers of the history.
        own["ended_history"] = storable_history(parts.history, parts.ranks)
    return {
        "scheduler": None if scheduler is None else scheduler.state_dict(),
        "scaler": None if scaler is None else scaler.state_dict(),
        "run": own,
    }


def _described(**objects: Any) -> dict[str, str]:
    """What modules and each module in them are, or other objects, in words by path. It says nothing about weights."""
    words = {}
    for name, part in objects.items():
        for path, each in part.named_modules() if isinstance(part, nn.Module) else [("", part)]:
            try:
                text = f"{type(each).__name__}({each.extra_repr()})" if isinstance(each, nn.Module) else repr(each)
            except Exception:  # a user's class may fail to describe itself, which must not prevent the save
                text = type(each).__name__
            words[f"{name}.{path}".rstrip(".")] = re.sub(r" at 0x[0-9a-f]+", "", text)[:_MOST_CHARACTERS]
    return words


def held_states(held: Mapping[str, Any], *, warns: bool) -> dict[str, Any]:
    """The states of held parts, by path. Those that are empty are left out.

    So are those that cannot be stored, such as quantized weights; with `warns`, a warning names them.
    """
    states, reasons = {}, []
    for path, part in held.items():
        module = as_module(part)
        state = part.state_dict() if module is None else canonical_state_dict(module)
        if hasattr(part, "param_groups"):
            state = without_callables(state)
        if state and (reason := _complaint_about(state, path)):
            reasons.append(reason)
        elif state:
            states[path] = state
    if reasons and warns:
        warnings.warn(
            f"Training states, and so resumed runs, leave out what the trainer holds at {'; '.join(reasons)}.",
            stacklevel=2,
        )
    return states


def as_module(part: Any) -> nn.Module | None:
    """A held part that is a module, or one that stands for a single parameter; None for an optimizer or the like."""
    if isinstance(part, torch.Tensor):
        return nn.ParameterDict({"value": part})
    return part if isinstance(part, nn.Module) else None


def entries_of_state(folder: Path, names: Collection[str]) -> dict[str, Any]:
    """Parts of a training state, by the names that `States.write_file` gives to the parts of a run.

    Args:
        folder: the training state.
        names: ``model``, and ``optimizer`` and ``scheduler`` if they are wanted.

    Raises:
        InvalidCheckpointError: if the state is damaged, or not there any more.
    """
    parts = read_state(folder, names)[1]
    return {f"{name}_state_dict": part for name, part in parts.items() if part is not None}


def key_of_state(callback: Any) -> str:
    """The name of a callback's state."""
    return getattr(callback, "state_key", None) or type(callback).__name__


def differences_from_first(ranks: Ranks, parts: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Difference]]:
    """How this rank's states differ from rank 0's, by part and name, without equal ones. Must be called by all ranks.

    Ranks compare checksums, so equal values are never sent. Sharded tensors count as equal: the training state has the
    pieces of all ranks anyway. A state that rank 0 does not have differs as a whole.

    Raises:
        CheckpointError: on every rank, if a state of any rank cannot be stored.
    """

    def own_digests() -> dict[str, Any]:
        for part, states in parts.items():
            encode(dict(states), path=part)  # raises, with the places of all values that cannot be stored
        return {part: {name: _digest(state) for name, state in states.items()} for part, states in parts.items()}

    digests = ranks.do_on_all(own_digests)
    first = ranks.from_first(digests)
    found: dict[str, dict[str, Difference]] = {}
    for part, states in parts.items():
        for name, state in states.items():
            if difference := list(_differing(state, digests[part][name], first[part].get(name), [])):
                found.setdefault(part, {})[name] = difference
    return found


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
        if reason := _complaint_about(value, name):
            reasons.setdefault(name, reason)
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


def _complaint_about(value: Any, path: str) -> str | None:
    """Why a value called `path` cannot be stored, in words; None if it can."""
    try:
        encode(value, path=path)
    except CheckpointError as error:
        return str(error).splitlines()[1].strip()
    return None
