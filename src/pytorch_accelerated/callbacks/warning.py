"""Warnings that point at a line of the user's code, not of the library."""

from __future__ import annotations

import sys
import warnings

from pytorch_accelerated.processes.ranks import Ranks

_NOT_THE_USERS = (__name__.partition(".")[0], "contextlib")


def warn_user(ranks: Ranks, message: str) -> None:
    """Warn on one process, pointing at the line of the user's code that called the library."""
    if ranks.is_first:
        warnings.warn(message, stacklevel=stacklevel_of_user())


def stacklevel_of_user() -> int:
    """The `stacklevel` with which `warnings.warn` in the caller points at the line of the user's code."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals["__name__"].partition(".")[0] in _NOT_THE_USERS:
        level, frame = level + 1, frame.f_back
    return level
