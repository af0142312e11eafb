"""Warnings that point at the user's line, not at ours."""

from __future__ import annotations

import sys
import warnings
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pytorch_accelerated.trainer import Trainer

_NOT_THE_USERS = (__name__.partition(".")[0], "contextlib")


def warn_user(trainer: Trainer, message: str) -> None:
    """Warn on one process, pointing at the line of the user's that all this comes from."""
    if not trainer._ranks.is_first:
        return
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_globals["__name__"].partition(".")[0] in _NOT_THE_USERS:
        level, frame = level + 1, frame.f_back
    warnings.warn(message, stacklevel=level)
