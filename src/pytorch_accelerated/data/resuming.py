"""The data in training states: seeds and fingerprints of loaders, and the position in a stream."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pytorch_accelerated.data.fingerprints import Fingerprint
from pytorch_accelerated.data.stream_loader import StreamLoader
from pytorch_accelerated.data.updates import Loaders, RunLoader
from pytorch_accelerated.errors import ConfigurationError, explained_loading
from pytorch_accelerated.facts.run_state import RunPhase, RunState
from pytorch_accelerated.ranks.ranks import Ranks

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


def saved_data(facts: Mapping[str, Any]) -> dict[str, SavedData]:
    """The inverse of `data_facts`, from the facts of a state; empty for older states."""
    sets = {role_of_set(name): entry for name, entry in facts.get("evaluation_sets", {}).items()}
    return {
        role: SavedData(entry["seed"], Fingerprint(entry["rows"], entry["indices"], entry["contents"]))
        for role, entry in {**facts.get("data", {}), **sets}.items()
    }


def role_of_set(name: str) -> str:
    """The key of an evaluation set with a name in the result of `saved_data`.

    Old states know only the first set, by the role "eval".
    """
    return f"eval/{name}"


def differing_rows(saved: Mapping[str, SavedData], loaders: Loaders, source: object) -> Iterator[str]:
    """A warning for each loader of a resumed run whose rows differ from the rows of the run that `source` has saved."""
    named = {role_of_set(name): loader for name, loader in loaders.eval_by_name.items()}
    evaluated = named if named.keys() & saved.keys() else {"eval": loaders.eval}
    for role, loader in {"train": loaders.train, **evaluated}.items():
        if role not in saved or not isinstance(loader, RunLoader):
            continue
        kind = _ROLES[role] if role in _ROLES else f"evaluation ({role.removeprefix('eval/')!r})"
        difference = saved[role].fingerprint.difference(loader.fingerprint)
        if difference is None:
            continue
        yield (
            f"The run resumes from {source}, but its {kind} data has changed (the "
            f"{type(loader.dataset).__name__} has {difference}). If it was split at random, rows of the training set "
            "may now be in the evaluation set: call `set_seed(...)` before the split, with the seed of the first run."
        )


def stream_state(loader: Any) -> dict[str, Any] | None:
    """How the stream that this rank trains on is divided, and its position in it if known; None for other data."""
    return loader.state_dict() if isinstance(loader, StreamLoader) else None


def restore_stream(
    loader: Any, states: Sequence[dict[str, Any] | None], ranks: Ranks, *, run_state: RunState, source: object
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
    divided = [state for state in states if state is not None]
    saved = [state for state in divided if "state" in state]
    if loader.stateful is None and not divided:
        return
    name = type(loader.dataset if loader.stateful is None else loader.stateful).__name__
    before, here = divided[0] if divided else loader.division, loader.division
    is_same_stream = max(1, here["workers"]) == max(1, before["workers"])
    if len(states) != ranks.count:
        is_same_stream &= not (here["is_sharded"] or before["is_sharded"])
    elif ranks.count > 1:
        is_same_stream &= here["is_sharded"] == before["is_sharded"]
    if loader.stateful is None and not saved and (is_same_stream or not is_within_epoch):
        return  # it is read again, as one that was never stopped reads it
    unknown = [state for state in saved if state["state"] is None and not state["is_finished"]]
    is_known = len(saved) == len(states) and not (is_within_epoch and unknown)
    is_like_before = len(states) == ranks.count and here["workers"] == before["workers"]
    if ranks.count > 1 and not loader.is_sharded and saved:  # cut in global batches
        is_like_before &= here["batch_size"] == before["batch_size"]
    if is_known and is_like_before and loader.stateful is not None:
        load = explained_loading(f"The {name}", source)(loader.load_state_dict)
        ranks.do_on_all(lambda: load(saved[ranks.index]))
        return
    reason = f"does not say where the {name} was"
    if is_known or not is_same_stream:
        processes = "1 process" if len(states) == 1 else f"{len(states)} processes"
        then = f"{processes} with num_workers={before['workers']}"
        now = f"{ranks.count} with {here['workers']}"
        reason = f"was saved by {then} (here {now}), with other batches or by another loader"
    if is_within_epoch and not is_same_stream:
        raise ConfigurationError(
            f"The training state {source} {reason}, within an epoch. This distributes the {name} differently, so it is "
            "unknown which of its samples are left. Resume as it was saved, or from a state between two epochs."
        )
    if ranks.is_first:
        warnings.warn(
            f"The training state {source} {reason}, so the {name} cannot resume from its own state. Its next pass "
            "starts like a new one, and skips used samples: this is exact only if they come in the same order again.",
            stacklevel=2,
        )
