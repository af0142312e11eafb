"""The structure of nested rows: containers with a path in place of each tensor, and put together again."""

from __future__ import annotations

import collections
from typing import Any

import torch

from pytorch_accelerated.trees import parts_of

ROOT = "predictions"

# By the path of the tensor, for example "predictions['boxes'][0]".
Leaves = dict[str, torch.Tensor]


def without_classes(structure: Any) -> Any:
    """A structure of plain containers, with an ordered dict of its fields in place of each named tuple."""
    parts = parts_of(structure)
    if parts is None:
        return structure
    plain = [without_classes(part) for part in parts]
    if isinstance(structure, dict):
        return dict(zip(structure, plain, strict=True))
    if hasattr(structure, "_fields"):
        return collections.OrderedDict(zip(structure._fields, plain, strict=True))
    return tuple(plain) if isinstance(structure, tuple) else plain


def filled(structure: Any, leaves: dict[str, Any]) -> Any:
    """A structure, with classes or without, with the leaf in place of each path."""
    parts = parts_of(structure)
    if parts is None:
        return leaves[structure]
    found = [filled(part, leaves) for part in parts]
    if isinstance(structure, collections.OrderedDict):
        return collections.namedtuple("Predictions", structure)(*found)
    if isinstance(structure, dict):
        return dict(zip(structure, found, strict=True))
    if hasattr(structure, "_fields"):
        return type(structure)(*found)
    return tuple(found) if isinstance(structure, tuple) else found
