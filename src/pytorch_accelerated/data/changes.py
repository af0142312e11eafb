"""Detects whether a dataset was changed after its worker processes were started, which have copies of it."""

from __future__ import annotations

import enum
import itertools
from collections.abc import Iterator
from typing import Any

import torch

from pytorch_accelerated.compat.torch import version_of

# Flags and transforms are close to the dataset itself; deeper levels are data.
_MAX_DEPTH = 6
_MAX_OBJECTS = 2000
_MAX_ITEMS = 32
_PLAIN = (type(None), bool, int, float, complex, str, bytes, enum.Enum, type, torch.dtype, torch.device)


class Snapshot:
    """The attributes of an object, of its attributes, and so on: plain values by value, other objects by identity.

    This detects that augmentation was switched off, or a transform replaced. It does not detect in-place changes of
    arrays, or changes in the closures and globals of functions.
    """

    def __init__(self, of: Any) -> None:
        self._parts = list(objects_within(of))

    def is_of(self, now: Any) -> bool:
        """Whether `now` is unchanged."""
        parts = list(objects_within(now))
        return len(parts) == len(self._parts) and all(map(_is_same, parts, self._parts))


def _is_same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    return isinstance(one, _PLAIN) and type(one) is type(other) and repr(one) == repr(other)  # NaN equals NaN


def objects_within(root: Any) -> Iterator[Any]:
    """The parts of `root`, always in the same order. The walk ends after many objects."""
    seen: set[int] = set()
    waiting: list[tuple[Any, int]] = [(root, 0)]
    while waiting and len(seen) < _MAX_OBJECTS:
        value, depth = waiting.pop()
        yield value
        if isinstance(value, _PLAIN) or id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, torch.Tensor):
            yield version_of(value)
            continue
        items: list[Any] = []
        if type(value) in (list, tuple):
            yield len(value)
            items += value[:_MAX_ITEMS]
        elif type(value) is dict:  # other mappings may read a file
            yield len(value)
            items += itertools.chain.from_iterable(itertools.islice(value.items(), _MAX_ITEMS))
        if type(getattr(value, "__dict__", None)) is dict:
            items += itertools.chain.from_iterable(vars(value).items())
        if depth < _MAX_DEPTH:
            waiting += [(item, depth + 1) for item in items]
