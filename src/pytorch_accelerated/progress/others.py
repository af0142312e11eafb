"""What others write while a bar is on the screen: lines of the log, and warnings."""

from __future__ import annotations

import contextlib
import logging
import os
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any


class OtherWriters:
    """Puts aside what others write: warnings, and what log handlers write to a terminal.

    Handlers that are added later, and what is printed, go straight to the screen: a debugger in a hook needs the
    real streams.

    Args:
        aside: makes a context manager, inside which they write.
    """

    def __init__(self, aside: Callable[[], AbstractContextManager[None]]) -> None:
        self._aside = aside
        self._count = 0
        self._undo = contextlib.ExitStack()

    def begin(self) -> None:
        """There is a bar more on the screen."""
        self._count += 1
        if self._count == 1:
            self._owner = os.getpid()
            for handler in _terminal_handlers():
                self._put_aside(handler, "emit")
            self._put_aside(warnings, "showwarning")

    def end(self) -> None:
        """There is a bar less."""
        self._count -= 1
        if not self._count:
            self._undo.close()

    def _put_aside(self, place: Any, name: str) -> None:
        before = getattr(place, name)
        had_its_own = name in vars(place)

        def write(*args: Any, **kwargs: Any) -> None:
            # Loader processes inherit this. They own no bar, and must not die with tqdm's lock in their hands.
            with self._aside() if os.getpid() == self._owner else contextlib.nullcontext():
                before(*args, **kwargs)

        def put_back() -> None:
            if vars(place).get(name) is not write:
                return  # somebody has put another one there in the meantime
            if had_its_own:
                setattr(place, name, before)
            else:
                delattr(place, name)

        setattr(place, name, write)
        self._undo.callback(put_back)


def _terminal_handlers() -> set[logging.Handler]:
    """The handlers of all loggers that write to a terminal, and the one of programs that have not set up logging."""
    loggers = [logging.root, *logging.root.manager.loggerDict.values()]
    handlers = {handler for logger in loggers if isinstance(logger, logging.Logger) for handler in logger.handlers}
    if logging.lastResort is not None:
        handlers.add(logging.lastResort)
    return {
        handler for handler in handlers if isinstance(handler, logging.StreamHandler) and _is_terminal(handler.stream)
    }


def _is_terminal(stream: Any) -> bool:
    try:
        return bool(stream.isatty())
    except (AttributeError, ValueError):  # not a whole file, or closed
        return False
