"""Undocumented parts of numpy: the memory layout of its default generator."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

_WORDS = 624


def words_of(generator: Any) -> Any:
    """The state of a Mersenne Twister as an array of `ctypes` that shares its memory: 624 words, then the position.

    Publicly the state is only copied word by word in Python, which takes a hundred times longer. The address is public,
    but not the layout behind it.

    Args:
        generator: a bit generator of numpy.

    Returns:
        625 numbers; None if `generator` is of another kind, or this numpy has another layout.
    """
    if type(generator) is not np.random.MT19937:
        return None
    words = (ctypes.c_uint32 * (_WORDS + 1)).from_address(generator.ctypes.state_address)
    state = generator.state["state"]
    return words if list(words) == [*state["key"].tolist(), state["pos"]] else None
