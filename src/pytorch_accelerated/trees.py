"""Nested containers: tuples, named tuples, lists and mappings, with leaves of any other kind in them.

The one place that knows how to walk, rebuild, join and cut them. Paths are written as Python would: ``['boxes'][0]``,
``.logits``. Rebuilt mappings are plain dicts, unless ``keep_mappings`` asks for the kind that they were.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch


def parts_of(data: Any) -> Sequence[Any] | None:
    """The items of a container, or the values of a mapping, in order. None for a leaf."""
    if isinstance(data, (tuple, list)):
        return data
    return list(data.values()) if isinstance(data, Mapping) else None


def leaves(data: Any) -> Iterator[Any]:
    """Yield every leaf, in order."""
    parts = parts_of(data)
    if parts is None:
        yield data
    else:
        for part in parts:
            yield from leaves(part)


def tensors_in(data: Any) -> list[torch.Tensor]:
    """The leaves that are tensors, in order."""
    return [leaf for leaf in leaves(data) if isinstance(leaf, torch.Tensor)]


def rebuilt(container: Any, parts: Iterable[Any], *, keep_mappings: bool = False) -> Any:
    """A container like `container`, with other parts in the same order."""
    if isinstance(container, Mapping):
        changed = dict(zip(container, parts, strict=True))
        return _with_values(container, changed) if keep_mappings else changed
    kind = type(container)
    return kind(*parts) if hasattr(container, "_fields") else kind(parts)


def map_leaves(function: Callable[[Any], Any], data: Any, *, keep_mappings: bool = False) -> Any:
    """`data` with ``function(leaf)`` in place of each leaf."""
    parts = parts_of(data)
    if parts is None:
        return function(data)
    mapped = [map_leaves(function, part, keep_mappings=keep_mappings) for part in parts]
    return rebuilt(data, mapped, keep_mappings=keep_mappings)


def map_paths(function: Callable[[str, Any], Any], data: Any, path: str = "") -> Any:
    """`data` with ``function(path, leaf)`` in place of each leaf.

    Args:
        function: called in the order of `leaves`.
        data: nested containers.
        path: what the paths begin with.
    """
    parts = parts_of(data)
    if parts is None:
        return function(path, data)
    if hasattr(data, "_fields"):
        places = [f"{path}.{field}" for field in data._fields]
    else:
        places = [f"{path}[{key!r}]" for key in (data if isinstance(data, Mapping) else range(len(parts)))]
    return rebuilt(data, [map_paths(function, part, place) for part, place in zip(parts, places, strict=True)])


def merged(function: Callable[[list[Any]], Any], trees: Sequence[Any], *, keep_mappings: bool = False) -> Any:
    """One tree in place of several, with ``function(what each of them has there)`` in place of each leaf.

    Where they do not have the same kind of container with the same keys, `function` gets what they have instead.
    """
    first = trees[0]
    if parts_of(first) is not None and all(_is_like(first, tree) for tree in trees):
        columns = [[tree[key] for key in first] if isinstance(first, Mapping) else tree for tree in trees]
        parts = [merged(function, list(each), keep_mappings=keep_mappings) for each in zip(*columns, strict=True)]
        return rebuilt(first, parts, keep_mappings=keep_mappings)
    return function(list(trees))


def with_tensors(data: Any, tensors: Iterable[torch.Tensor], *, keep_mappings: bool = False) -> Any:
    """`data` with other tensors in place of its own, in the order of `tensors_in`."""
    others = iter(tensors)
    return map_leaves(
        lambda leaf: next(others) if isinstance(leaf, torch.Tensor) else leaf, data, keep_mappings=keep_mappings
    )


def split_rows(data: Any, sizes: Sequence[int]) -> Iterator[Any]:
    """Yield views of `data` with `sizes` rows each, which make up all rows. Mappings keep their kind."""
    for tensors in zip(*(tensor.split(list(sizes)) for tensor in tensors_in(data)), strict=True):
        yield with_tensors(data, tensors, keep_mappings=True)


def count_rows(data: Any) -> int | None:
    """The first dimension of the first tensor or array; None if there is none."""
    if type(data) in (list, tuple) and data and isinstance(data[0], torch.Tensor) and data[0].ndim:
        return data[0].shape[0]  # the answer for most batches, without a search
    return next((int(leaf.shape[0]) for leaf in leaves(data) if getattr(leaf, "shape", None)), None)


def _is_like(first: Any, other: Any) -> bool:
    if type(other) is not type(first):
        return False
    return bool(other.keys() == first.keys()) if isinstance(first, Mapping) else len(other) == len(first)


def _with_values(mapping: Mapping[Any, Any], values: Mapping[Any, Any]) -> Any:
    changed: Any = copy.copy(mapping)
    for key, value in values.items():
        changed[key] = value
    return changed
