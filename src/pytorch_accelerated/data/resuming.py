"""The data in training states: seeds and fingerprints of loaders, and the position in a stream."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pytorch_accelerated.checkpointing.codec import encode
from pytorch_accelerated.data.fingerprints import Fingerprint, hash_of_contents
from pytorch_accelerated.data.hub_streams import has_unseeded_order
from pytorch_accelerated.data.loaders import Loaders
from pytorch_accelerated.data.stream_loader import StreamLoader
from pytorch_accelerated.data.streams import has_state
from pytorch_accelerated.data.updates import RunLoader
from pytorch_accelerated.errors import CheckpointError, ConfigurationError, InvalidCheckpointError
from pytorch_accelerated.processes.ranks import Ranks
from pytorch_accelerated.training.run_state import RunPhase, RunState

_ROLES = {"train": "training", "eval": "evaluation"}


@dataclasses.dataclass(frozen=True)
class SavedData:
    """The facts about a loader in a training state: the seed of its order, and the fingerprint of its rows."""

    seed: int
    fingerprint: Fingerprint


def data_facts(**loaders: Any) -> dict[str, dict[str, Any]]:
    """The facts about the loaders of a run for a training state, by role or by the name of an evaluation set."""
    return {
        role: {"seed": loader.seed, **dataclasses.asdict(loader.fingerprint)}
        for role, loader in loaders.items()
        if isinstance(loader, RunLoader)
    }


def saved_data(facts: Mapping[str, Any], *, source: object) -> dict[str, SavedData]:
    """The inverse of `data_facts`, from the facts of a state; empty for older states.

    Raises:
        InvalidCheckpointError: if no run has written these facts.
    """
    try:
        entries = dict(facts.get("data", {}))
        if entries.keys() - _ROLES.keys():
            raise ValueError(f"data has other entries than {', '.join(_ROLES)}")
        entries.update({role_of_set(name): entry for name, entry in facts.get("evaluation_sets", {}).items()})
        found = {}
        for role, (seed, *parts) in ((role, _values(entry)) for role, entry in entries.items()):
            kinds_fit = all(
                part is None or type(part) is kind for part, kind in zip(parts, (int, str, str), strict=True)
            )
            if type(seed) is not int or not kinds_fit:
                raise ValueError(f"data.{role} has entries of other types")
            found[role] = SavedData(seed, Fingerprint(*parts))
        return found
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise InvalidCheckpointError(
            f"The training state {source} matches its manifest, but no run has written its facts about the data "
            f"({type(error).__name__}: {error}). Use another one."
        ) from error


def role_of_set(name: str) -> str:
    """The key of an evaluation set with a name in the result of `saved_data`.

    Old states know only the first set, by the role "eval".
    """
    return f"eval/{name}"


def _values(entry: Mapping[str, Any]) -> list[Any]:
    return [entry[name] for name in ("seed", "rows", "indices", "contents")]


def differing_rows(saved: Mapping[str, SavedData], loaders: Loaders, source: object) -> Iterator[str]:
    """A warning for each loader of a resumed run whose rows differ from those of the run that `source` has saved."""
    named = {role_of_set(name): loader for name, loader in loaders.eval_by_name.items()}
    evaluated = named if named.keys() & saved.keys() else {"eval": loaders.eval}
    for role, loader in {"train": loaders.train, **evaluated}.items():
        if role not in saved or not isinstance(loader, RunLoader):
            continue
        kind = _ROLES[role] if role in _ROLES else f"evaluation ({role.removeprefix('eval/')!r})"
        now = loader.fingerprint
        difference = saved[role].fingerprint.difference(now)
        same_otherwise = dataclasses.replace(now, contents=None)
        if difference is None or (
            saved[role].fingerprint.difference(same_otherwise) is None
            # The rows of a dataset with its own generator differ each time they are fetched.
            and hash_of_contents(loader.source) != now.contents
        ):
            continue
        yield (
            f"The run resumes from {source}, but its {kind} data has changed (the "
            f"{type(loader.dataset).__name__} has {difference}). If it was split at random, rows of the training set "
            "may now be in the evaluation set: call `set_seed(...)` before the split, with the seed of the first run, "
            "or keep the split in a file. If the change is intended, ignore this warning."
        )


def stream_state(loader: Any, ranks: Ranks) -> dict[str, Any] | None:
    """This rank's position in the stream that it trains on; None for other data, or if unknown in this process."""
    if not isinstance(loader, StreamLoader):
        return None
    if has_unseeded_order(loader.dataset) and ranks.is_first:
        warnings.warn(
            f"The {type(loader.dataset).__name__} is shuffled without a seed, so every process reads it in a different "
            "order. A run that resumes within an epoch will see some of its samples twice and others never. Pass a "
            "seed, as in `dataset.shuffle(seed=0)`.",
            stacklevel=2,
        )
    if loader.stateful is not None:
        state = loader.state_dict()
        try:
            encode(state["borrowed"], path="the last batch")
        except CheckpointError:
            state["borrowed"] = None  # only a rank without further batches would need it
        return state
    if has_state(loader.dataset) and ranks.is_first:
        name = type(loader.dataset).__name__
        warnings.warn(
            f"The {name} has a state, but {loader.num_workers} worker processes read it, so its position is unknown in "
            "this process. A run that resumes within an epoch will read the epoch from its beginning and skip the used "
            "samples. Pass torchdata's `StatefulDataLoader`, or use num_workers=0, to have the state saved.",
            stacklevel=2,
        )
    return None


def restore_stream(
    loader: Any,
    states: Sequence[dict[str, Any] | None],
    ranks: Ranks,
    *,
    run_state: RunState,
    source: object,
) -> None:
    """Resume the training stream from the `stream_state` of all ranks. Must be called by all ranks.

    If that is impossible, the stream will be read again, with a warning on the first rank. `states` and `run_state` are
    those of the saved run, `loader` and `ranks` those of the resumed one.

    Raises:
        ConfigurationError: if it is unknown which samples of the epoch are left.
        InvalidCheckpointError: if the dataset or loader cannot load its state.
    """
    if not isinstance(loader, StreamLoader):
        return
    is_within_epoch = run_state.phase is RunPhase.TRAINING and run_state.updates_in_epoch > 0
    saved = [state for state in states if state is not None]
    if loader.stateful is None and not saved:
        return
    name = type(loader.dataset if loader.stateful is None else loader.stateful).__name__
    workers, workers_before = loader.num_workers or 0, saved[0]["workers"] if saved else 0
    is_cut_in_global_batches = ranks.count > 1 and not loader.is_sharded
    is_same_stream = not saved or (
        max(1, workers) == max(1, workers_before)
        and (len(states) == ranks.count or not (loader.is_sharded or saved[0]["is_sharded"]))
    )
    reason: str | None = None
    if len(saved) < len(states) or any(is_within_epoch and _is_unknown(state) for state in saved):
        reason = f"does not say where the {name} was"
    elif len(states) != ranks.count:
        reason = f"was saved by {len(states)} processes, not {ranks.count}"
    elif workers != workers_before:
        reason = f"was saved with num_workers={workers_before}, not {workers}"
    elif loader.stateful is None:
        reason = f"holds a state that the loader of the {name} cannot load"
    elif is_cut_in_global_batches and loader.batch_size != saved[0]["batch_size"]:
        reason = f"was saved with batches of {saved[0]['batch_size']}, not {loader.batch_size}, on each process"
    if reason is None:
        ranks.do_on_all(lambda: _load(loader, states[ranks.index], name=name, source=source))
    elif is_within_epoch and not is_same_stream:
        raise ConfigurationError(
            f"The training state {source} {reason}, within an epoch. This distributes the {name} differently, so it is "
            "unknown which of its samples are left. Resume as it was saved, or from a state between two epochs."
        )
    elif ranks.is_first:
        effect = (
            "It is read from the beginning of the epoch, and used samples are skipped: this is exact only if they come "
            "in the same order again"
            if is_within_epoch
            else "Its next pass starts like that of a new one: this is exact only if it keeps nothing between passes"
        )
        warnings.warn(
            f"The training state {source} {reason}, so the {name} cannot resume from its own state. {effect}.",
            stacklevel=2,
        )


def _is_unknown(state: dict[str, Any]) -> bool:
    return state["state"] is None and not state["is_finished"]


def _load(loader: StreamLoader, state: Any, *, name: str, source: object) -> None:
    try:
        loader.load_state_dict(state)
    except Exception as error:  # whatever a user's class raises
        raise InvalidCheckpointError(
            f"The {name} cannot load its state from the training state {source} ({type(error).__name__}: {error}). "
            "Nothing else was loaded. Pass the dataset and loader with which it was saved, or another state."
        ) from error
