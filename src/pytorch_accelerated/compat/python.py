"""Parts of Python that are undocumented, or that the oldest supported one lacks."""

from __future__ import annotations

import ctypes
import random
import sys

_WORDS = 624


def memory_of_random() -> memoryview | None:
    """The state of the generator behind ``random.random()``, as bytes that share its memory: position, then 624 words.

    Publicly the state is a tuple of 625 Python numbers, which takes a hundred times longer. The second number of a pair
    of normally distributed ones is not in it, but in ``gauss_next``.

    Returns:
        None if this Python has another layout.
    """
    generator = random.random.__self__  # type: ignore[attr-defined]
    size = (_WORDS + 1) * ctypes.sizeof(ctypes.c_uint32)
    if type(generator) is not random.Random or random.Random.__basicsize__ < object.__basicsize__ + size:
        return None
    words = (ctypes.c_uint32 * (_WORDS + 1)).from_address(id(generator) + object.__basicsize__)
    *state, position = random.getstate()[1]
    return memoryview(words).cast("B") if list(words) == [position, *state] else None


def add_note(error: BaseException, note: str) -> None:
    """Add a note to an exception, where Python 3.11 has `add_note`."""
    if sys.version_info >= (3, 11):
        error.add_note(note)
    else:
        error.__notes__ = [*getattr(error, "__notes__", ()), note]  # type: ignore[attr-defined]
