"""The bars on the screen, which make room for what others write: log lines and warnings."""

from __future__ import annotations

import contextlib
import logging
import warnings
from typing import Any


class BarsOnScreen:
    """The bars on the screen. A log line or a warning clears them; they are drawn again soon after.

    Handlers that are added later, and what is printed, don't clear bars. `docs/design/progress.md` says why tqdm's own
    means do not do.
    """

    def __init__(self) -> None:
        self._bars: list[Any] = []
        self._are_cleared = False
        self._undo = contextlib.ExitStack()

    def add(self, bar: Any) -> None:
        """Take in a bar that has been drawn, below the others."""
        if not self._bars:
            self._make_room_for_others()
        self._bars.append(bar)

    def remove(self, bar: Any) -> None:
        """Leave out a bar that is about to be closed."""
        self._bars.remove(bar)
        if not self._bars:
            self._undo.close()

    def redraw(self) -> None:
        """Draw all bars again, if something has cleared them."""
        if self._are_cleared:
            self._are_cleared = False
            for bar in self._bars:
                bar.refresh()

    def _clear(self, *_: Any) -> bool:
        """Clear all bars, also as a filter of log handlers."""
        for bar in self._bars:
            bar.clear(nolock=True)  # a loader process that dies with the lock would stop this one
        self._are_cleared = True
        return True

    def _make_room_for_others(self) -> None:
        for handler in _terminal_handlers():
            handler.addFilter(self._clear)
            self._undo.callback(handler.removeFilter, self._clear)
        before = warnings.showwarning

        def show(*args: Any, **kwargs: Any) -> None:
            self._clear()
            before(*args, **kwargs)

        def restore() -> None:
            if warnings.showwarning is show:  # somebody may have assigned another one in the meantime
                warnings.showwarning = before

        warnings.showwarning = show
        self._undo.callback(restore)


def _terminal_handlers() -> set[logging.Handler]:
    """All handlers that write to a terminal, and the one of programs that have not set up logging."""
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
