"""Undocumented parts of numpy: the memory layout of its default generator."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

_WORDS = 624


def memory_of(generator: Any) -> memoryview | None:
    """The whole state of a Mersenne Twister, as bytes that share its memory: 624 words, then the position.

    Publicly the state is only copied word by word in Python, which takes a hundred times longer. The address is public,
    but not the layout behind it.

    Args:
        generator: a bit generator of numpy.

    Returns:
        None if `generator` is of another kind, or this numpy has another layout.
    """
    if not isinstance(generator, np.random.MT19937):
        return None
    words = (ctypes.c_uint32 * (_WORDS + 1)).from_address(generator.ctypes.state_address)
    state: Any = generator.state["state"]
    is_as_known = list(words) == [*state["key"].tolist(), state["pos"]]
    return memoryview(words).cast("B") if is_as_known else None
