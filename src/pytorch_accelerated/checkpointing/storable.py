"""What is stored of a history, and of objects whose states are equal, or nearly equal, on all ranks.

Of the latter, rank 0's state is stored whole. Every other rank stores only its differences: a list of
``[path, value]``, where a path is a list of keys of nested dicts. An average of weights, for example, costs each
further rank its own batch statistics, not another copy of the weights.
"""

from __future__ import annotations

import copy
import hashlib
import warnings
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any

from pytorch_accelerated.checkpointing.codec import encode
from pytorch_accelerated.checkpointing.formats import chunks, dump_json
from pytorch_accelerated.errors import CheckpointError
from pytorch_accelerated.processes.ranks import Ranks
from pytorch_accelerated.tracking.history import RunHistory, with_some_records
from pytorch_accelerated.tracking.values import on_host

Difference = list[list[Any]]
"""Entries ``[path, value]``."""


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
