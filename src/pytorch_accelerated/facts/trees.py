"""Nested containers: tuples, named tuples, lists and mappings, with leaves of any other kind in them.

The one place that knows how to walk, rebuild, join and cut them. Paths are written as Python would: ``['boxes'][0]``,
``.logits``. Rebuilt mappings are plain dicts, unless ``keep_mappings`` asks for the kind that they were. The argument
``parts`` says what counts as a container: `parts_of`, or `plain_parts_of` for builtin types only.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

Parts = Callable[[Any], Sequence[Any] | None]


def parts_of(data: Any) -> Sequence[Any] | None:
    """The items of a container, or the values of a mapping, in order. None for a leaf."""
    if isinstance(data, (tuple, list)):
        return data
    if isinstance(data, torch.Tensor):
        return None  # most leaves: looking for an abstract class takes longer than all the rest
    return list(data.values()) if isinstance(data, (dict, Mapping)) else None


def plain_parts_of(data: Any) -> Sequence[Any] | None:
    """As `parts_of`, but instances of subclasses and other mappings than dicts are leaves."""
    return parts_of(data) if type(data) in (tuple, list, dict) else None


def leaves(data: Any, *, parts: Parts = parts_of) -> Iterator[Any]:
    """Yield every leaf, in order."""
    inner = parts(data)
    if inner is None:
        yield data
    else:
        for part in inner:
            yield from leaves(part, parts=parts)


def tensors_in(data: Any) -> list[torch.Tensor]:
    """The leaves that are tensors, in order."""
    return [leaf for leaf in leaves(data) if isinstance(leaf, torch.Tensor)]


def rebuilt(container: Any, parts: Iterable[Any], *, keep_mappings: bool = False) -> Any:
    """A container like `container`, with other parts in the same order."""
    if isinstance(container, (dict, Mapping)):
        changed = dict(zip(container, parts, strict=True))
        return _with_values(container, changed) if keep_mappings else changed
    kind = type(container)
    return kind(*parts) if hasattr(container, "_fields") else kind(parts)


def map_leaves(
    function: Callable[[Any], Any], data: Any, *, keep_mappings: bool = False, parts: Parts = parts_of
) -> Any:
    """`data` with ``function(leaf)`` in place of each leaf."""
    inner = parts(data)
    if inner is None:
        return function(data)
    mapped = [map_leaves(function, part, keep_mappings=keep_mappings, parts=parts) for part in inner]
    return rebuilt(data, mapped, keep_mappings=keep_mappings)


def map_paths(function: Callable[[str, Any], Any], data: Any, path: str = "", *, parts: Parts = parts_of) -> Any:
    """`data` with ``function(path, leaf)`` in place of each leaf, called in the order of `leaves`.

    Args:
        function: what to call.
        data: nested containers.
        path: the beginning of all paths.
        parts: see the top of this file.
    """
    inner = parts(data)
    if inner is None:
        return function(path, data)
    if hasattr(data, "_fields"):
        places = [f"{path}.{field}" for field in data._fields]
    else:
        places = [f"{path}[{key!r}]" for key in (data if isinstance(data, (dict, Mapping)) else range(len(inner)))]
    mapped = [map_paths(function, part, place, parts=parts) for part, place in zip(inner, places, strict=True)]
    return rebuilt(data, mapped)


def leaves_by_path(data: Any, path: str = "", *, parts: Parts = parts_of) -> dict[str, Any]:
    """Every leaf by its path, in order."""
    found: dict[str, Any] = {}
    map_paths(found.__setitem__, data, path, parts=parts)
    return found


def merged(function: Callable[[list[Any]], Any], trees: Sequence[Any], *, keep_mappings: bool = False) -> Any:
    """One tree in place of two or more, with ``function(what each of them has there)`` in place of each leaf.

    Where they do not have the same kind of container with the same keys, `function` gets what they have instead.
    """
    first = trees[0]
    if parts_of(first) is not None and all(_is_like(first, tree) for tree in trees):
        columns = [[tree[key] for key in first] if isinstance(first, Mapping) else tree for tree in trees]
        parts = [merged(function, list(each), keep_mappings=keep_mappings) for each in zip(*columns, strict=True)]
        return rebuilt(first, parts, keep_mappings=keep_mappings)
    return function(list(trees))


def would_broadcast(first: Any, second: Any) -> bool:
    """Whether one of them is a column and the other a row of two or more numbers, which torch broadcasts to a table."""
    if not (isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor)) or first.ndim + second.ndim != 3:
        return False
    column, row = (first, second) if first.ndim == 2 else (second, first)
    return column.ndim == 2 and column.shape[1] == 1 < row.shape[0]


def count_rows(data: Any) -> int | None:
    """The first dimension of the first tensor or array; None if there is none."""
    parts = parts_of(data)
    if parts is None:
        return int(data.shape[0]) if getattr(data, "shape", None) else None
    for part in parts:  # not `leaves`: each batch is asked, and its first tensor comes early
        rows = count_rows(part)
        if rows is not None:
            return rows
    return None


def length_of(data: Any) -> int | None:
    """The batches of a loader, or the rows of a dataset; None for a stream."""
    try:
        return len(data)
    except (TypeError, NotImplementedError):
        return None


def _is_like(first: Any, other: Any) -> bool:
    if type(other) is not type(first):
        return False
    return bool(other.keys() == first.keys()) if isinstance(first, Mapping) else len(other) == len(first)


def _with_values(mapping: Mapping[Any, Any], values: Mapping[Any, Any]) -> Any:
    changed: Any = copy.copy(mapping)
    for key, value in values.items():
        changed[key] = value
    return changed
