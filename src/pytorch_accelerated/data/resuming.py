"""What a training state says of the data: how it was read, and the state of a stream that the run resumes from."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pytorch_accelerated.checkpointing.codec import encode
from pytorch_accelerated.data.fingerprints import Fingerprint, hash_of_contents
from pytorch_accelerated.data.hub_streams import has_unseeded_order
from pytorch_accelerated.data.stream_loader import StreamLoader
from pytorch_accelerated.data.streams import has_state
from pytorch_accelerated.data.updates import RunLoader
from pytorch_accelerated.errors import CheckpointError, ConfigurationError, InvalidCheckpointError
from pytorch_accelerated.processes.ranks import Ranks
from pytorch_accelerated.training.run_state import RunPhase, RunState

_ROLES = {"train": "training", "eval": "evaluation"}


@dataclasses.dataclass(frozen=True)
class SavedData:
    """What a training state knows of a loader.

    Attributes:
        seed: of its order.
        fingerprint: of its rows.
    """

    seed: int
    fingerprint: Fingerprint


def data_facts(**loaders: Any) -> dict[str, dict[str, Any]]:
    """What a training state keeps of the loaders of a run, by their role."""
    return {
        role: {"seed": loader.seed, **dataclasses.asdict(loader.fingerprint)}
        for role, loader in loaders.items()
        if isinstance(loader, RunLoader)
    }


def saved_data(facts: Mapping[str, Any], *, source: object) -> dict[str, SavedData]:
    """The inverse of `data_facts`, from the facts of a state. Older ones have none.

    Raises:
        InvalidCheckpointError: if no run has written them.
    """
    try:
        found = {}
        for role, (seed, *parts) in ((role, _values(entry)) for role, entry in facts.get("data", {}).items()):
            kinds_fit = all(
                part is None or type(part) is kind for part, kind in zip(parts, (int, str, str), strict=True)
            )
            if type(seed) is not int or role not in _ROLES or not kinds_fit:
                raise ValueError(f"data.{role} is none that a run writes")
            found[role] = SavedData(seed, Fingerprint(*parts))
        return found
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise InvalidCheckpointError(
            f"The training state {source} fits its manifest, but no run has written what it says of its data "
            f"({type(error).__name__}: {error}). Use another one."
        ) from error


def _values(entry: Mapping[str, Any]) -> list[Any]:
    return [entry[name] for name in ("seed", "rows", "indices", "contents")]


def differing_rows(
    saved: Mapping[str, SavedData], train_dataloader: Any, eval_dataloader: Any, source: object
) -> Iterator[str]:
    """For each loader of a resumed run whose rows are not those that it was saved with: what to warn of.

    Args:
        saved: of the run that was saved.
        train_dataloader: of the resumed run.
        eval_dataloader: of the resumed run.
        source: the training state, for the message.
    """
    for role, loader in {"train": train_dataloader, "eval": eval_dataloader}.items():
        if role not in saved or not isinstance(loader, RunLoader):
            continue
        now = loader.fingerprint
        difference = saved[role].fingerprint.difference(now)
        same_otherwise = dataclasses.replace(now, contents=None)
        if difference is None or (
            saved[role].fingerprint.difference(same_otherwise) is None
            # A dataset that draws from a generator of its own holds something else each time.
            and hash_of_contents(loader.source) != now.contents
        ):
            continue
        yield (
            f"The run resumes from {source}, but its {_ROLES[role]} data ({type(loader.dataset).__name__}) is not what "
            f"it was saved with: it has {difference}. If it was split at random, rows that were trained on may now be "
            "evaluated on: call `set_seed(...)` before the split, with the seed of the first run, or keep the split in "
            "a file. If the change is meant, all is well."
        )


def stream_state(loader: Any, ranks: Ranks) -> dict[str, Any] | None:
    """Where this rank is in the stream that it trains on; None for other data, or if nobody in this process knows."""
    if not isinstance(loader, StreamLoader):
        return None
    if has_unseeded_order(loader.dataset) and ranks.is_first:
        warnings.warn(
            f"The {type(loader.dataset).__name__} is put into a random order without a seed, so every process reads it "
            "in another one. A run that goes on within an epoch will see some of its samples twice and others never. "
            "Pass a seed where the order is made, as in `dataset.shuffle(seed=0)`.",
            stacklevel=2,
        )
    if loader.stateful is not None:
        state = loader.state_dict()
        try:
            encode(state["borrowed"], path="the last batch")
        except CheckpointError:
            state["borrowed"] = None  # a rank that has batches left will not miss it
        return state
    if has_state(loader.dataset) and ranks.is_first:
        name = type(loader.dataset).__name__
        warnings.warn(
            f"The {name} has a state, but {loader.num_workers} worker processes read it, and it is not known here how "
            "far they are. A run that goes on within an epoch will read that from its beginning and skip what has been "
            "used. Pass torchdata's `StatefulDataLoader`, or use num_workers=0, to have the state saved.",
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
    """Let the stream that is trained on go on from the `stream_state` of all ranks. Must be called by all ranks.

    Where it cannot, it will be read again, with a warning on the first rank.

    Args:
        loader: the training loader of the run that goes on.
        states: by rank of the run that was saved.
        ranks: of the run that goes on.
        run_state: of the run that was saved.
        source: the training state, for messages.

    Raises:
        ConfigurationError: if nobody could tell which samples of the epoch are left.
        InvalidCheckpointError: if the dataset or loader does not take its state.
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
        reason = f"holds a state that the loader of the {name} cannot take"
    elif is_cut_in_global_batches and loader.batch_size != saved[0]["batch_size"]:
        reason = f"was saved with batches of {saved[0]['batch_size']}, not {loader.batch_size}, on each process"
    if reason is None:
        ranks.do_on_all(lambda: _load(loader, states[ranks.index], name=name, source=source))
    elif is_within_epoch and not is_same_stream:
        raise ConfigurationError(
            f"The training state {source} {reason}, within an epoch: that deals the {name} out in another way, and "
            "nobody can tell which of its samples are left. Go on as it was saved, or from a state between two epochs."
        )
    elif ranks.is_first:
        effect = (
            "It is read from the beginning of the epoch, and what has been used is skipped: the same samples only if "
            "they come in the same order again"
            if is_within_epoch
            else "Its next pass begins as that of a new one: the same only if it keeps nothing between passes"
        )
        warnings.warn(
            f"The training state {source} {reason}, so the {name} cannot go on from its own state. {effect}.",
            stacklevel=2,
        )


def _is_unknown(state: dict[str, Any]) -> bool:
    return state["state"] is None and not state["is_finished"]


def _load(loader: StreamLoader, state: Any, *, name: str, source: object) -> None:
    try:
        loader.load_state_dict(state)
    except Exception as error:  # whatever a user's class raises
        raise InvalidCheckpointError(
            f"The {name} does not take the state that the training state {source} has for it ({type(error).__name__}: "
            f"{error}). Nothing else was loaded. Pass the dataset and loader with which it was saved, or another state."
        ) from error
