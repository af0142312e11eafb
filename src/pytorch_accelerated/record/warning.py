"""Warnings that point at a line of the user's code, not of the library."""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

import tqdm

from pytorch_accelerated.errors import StopTrainingError
from pytorch_accelerated.ranks.ranks import Ranks
from pytorch_accelerated.record.text import printable

Callback = TypeVar("Callback")

_NOT_THE_USERS = (__name__.partition(".")[0], "contextlib")


def warn_user(ranks: Ranks, message: str) -> None:
    """Warn on one process, pointing at the line of the user's code that called the library."""
    if ranks.is_first:
        _warn(message)


def never_ends_a_run(callback: type[Callback]) -> type[Callback]:
    """Decorator for a callback: the first error in one of its events is a warning, later ones are ignored."""
    for name, event in list(vars(callback).items()):
        if name.startswith("on_"):
            setattr(callback, name, _with_warning(event))
    return callback


def _with_warning(event: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(event)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> None:
        try:
            event(self, *args, **kwargs)
        except StopTrainingError:
            raise
        except Exception as error:
            has_failed, self._has_failed = getattr(self, "_has_failed", False), True
            if not has_failed:
                what = f"{type(self).__name__} failed in `{event.__name__}` ({type(error).__name__}: {error})."
                _warn(f"{what} The run continues, and tries again at the next event, without a further warning.")

    return wrapper


def _warn(message: str) -> None:
    with tqdm.tqdm.external_write_mode():  # above the bars
        warnings.warn(printable(message, keep="\n\t"), stacklevel=stacklevel_of_user())


def stacklevel_of_user() -> int:
    """The `stacklevel` with which `warnings.warn` in the caller points at the line of the user's code."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals["__name__"].partition(".")[0] in _NOT_THE_USERS:
        level, frame = level + 1, frame.f_back
    return level
