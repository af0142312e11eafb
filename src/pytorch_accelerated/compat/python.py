"""Parts of Python that the oldest supported one lacks."""

from __future__ import annotations

import sys


def add_note(error: BaseException, note: str) -> None:
    """Add a note to an exception, where Python 3.11 has `add_note`."""
    if sys.version_info >= (3, 11):
        error.add_note(note)
    else:
        error.__notes__ = [*getattr(error, "__notes__", ()), note]  # type: ignore[attr-defined]
