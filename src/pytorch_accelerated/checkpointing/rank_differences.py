"""What a rank has for itself in states that are the same on all ranks, or nearly.

Rank 0's state is stored whole. Every other rank stores how its own differs, if it does: a list of ``[path, value]``,
where a path is a list of keys of nested dicts. So an average of weights costs each further rank the batch statistics
in which it differs, not another copy of the weights.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from pytorch_accelerated.checkpointing.codec import encode
from pytorch_accelerated.checkpointing.strict_json import dump_json
from pytorch_accelerated.checkpointing.tensor_file import chunks
from pytorch_accelerated.tracking.values import on_host

if TYPE_CHECKING:
    from pytorch_accelerated.processes.ranks import Ranks

Difference = list[list[Any]]
"""Entries ``[path, value]``."""


def differences_from_first(ranks: Ranks, states: Mapping[str, Any], *, path: str) -> dict[str, Difference]:
    """How this rank's `states` differ from rank 0's, by name; only those that do. Must be called by all ranks.

    Ranks compare checksums, so what is equal everywhere is sent nowhere. Sharded tensors count as equal: the state has
    the pieces of all ranks anyway.

    Args:
        ranks: those that compare.
        states: by name; a name that rank 0 does not have differs as a whole.
        path: what errors call `states`.

    Raises:
        CheckpointError: on every rank, if a state of any rank cannot be stored.
    """
    if ranks.count == 1:
        return {}
    digests = ranks.do_on_all(lambda: _digests(dict(states), path=path))
    first = ranks.from_first(digests)
    differences = {name: list(_differing(state, digests[name], first.get(name), [])) for name, state in states.items()}
    return {name: difference for name, difference in differences.items() if difference}


def with_difference(state: Any, difference: Difference) -> Any:
    """Rank 0's `state` with what another rank has in its place."""
    for path, value in difference:
        state = _replaced(state, path, value)
    return state


def check_difference(difference: Any, name: str) -> None:
    """Refuse, by whichever error that brings, what `differences_from_first` has not returned."""
    for path, _ in difference:
        if not isinstance(path, list) or not all(isinstance(key, str) for key in path):
            raise TypeError(f"{name} has a {type(path).__name__} for a path, or keys that are no text")


def _replaced(state: Any, path: list[str], value: Any) -> Any:
    if not path:
        return value
    return {**state, path[0]: _replaced(state[path[0]], path[1:], value)}


def _digests(states: dict[str, Any], *, path: str) -> dict[str, Any]:
    encode(states, path=path)  # complains of everything that cannot be stored, with its place
    return {name: _digest(state) for name, state in states.items()}


def _digest(value: Any) -> Any:
    """A checksum, or a dict of them where `value` is a dict."""
    if type(value) is dict and all(type(key) is str for key in value):
        return {key: _digest(item) for key, item in value.items()}
    encoded = encode(value, path="")
    if encoded.sharded:
        return b"sharded"
    checksum = hashlib.sha256(dump_json(encoded.structure, what="A part of a state"))
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
