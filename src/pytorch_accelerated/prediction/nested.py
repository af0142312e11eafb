"""Nested data taken apart: its structure, with a name in place of each tensor, and put together again."""

from __future__ import annotations

import collections
from collections.abc import Callable, Mapping
from typing import Any

import torch

ROOT = "predictions"

# By the path of the tensor, for example "predictions['boxes'][0]"; all with the same number of rows.
Leaves = dict[str, torch.Tensor]


def map_leaves(function: Callable[[str, Any], Any], data: Any, path: str = ROOT) -> Any:
    """`data` with ``function(path, leaf)`` for everything in it that is no container; mappings become dicts."""
    if isinstance(data, Mapping):
        return {key: map_leaves(function, item, f"{path}[{key!r}]") for key, item in data.items()}
    if isinstance(data, tuple) and hasattr(data, "_fields"):
        fields = zip(data._fields, data, strict=True)
        return type(data)(*(map_leaves(function, item, f"{path}.{field}") for field, item in fields))
    if isinstance(data, (tuple, list)):
        items = (map_leaves(function, item, f"{path}[{index}]") for index, item in enumerate(data))
        return tuple(items) if isinstance(data, tuple) else list(items)
    return function(path, data)


def without_classes(structure: Any) -> Any:
    """A structure with each named tuple as an ordered dict of its fields."""
    if isinstance(structure, dict):
        return {key: without_classes(item) for key, item in structure.items()}
    if isinstance(structure, tuple) and hasattr(structure, "_fields"):
        return collections.OrderedDict(zip(structure._fields, map(without_classes, structure), strict=True))
    if isinstance(structure, (tuple, list)):
        return type(structure)(map(without_classes, structure))
    return structure


def filled(structure: Any, leaves: Leaves) -> Any:
    """A structure, with classes or without, with its tensors in place of their paths."""
    if isinstance(structure, collections.OrderedDict):
        return collections.namedtuple("Predictions", structure)(*(filled(item, leaves) for item in structure.values()))
    if isinstance(structure, dict):
        return {key: filled(item, leaves) for key, item in structure.items()}
    if isinstance(structure, tuple) and hasattr(structure, "_fields"):
        return type(structure)(*(filled(item, leaves) for item in structure))
    if isinstance(structure, (tuple, list)):
        return type(structure)(filled(item, leaves) for item in structure)
    return leaves[structure]
