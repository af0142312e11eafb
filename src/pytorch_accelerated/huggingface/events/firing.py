"""Calls the callbacks of a trainer, and keeps the control that they leave."""

from __future__ import annotations

from typing import Any

from pytorch_accelerated.huggingface.engine.face import Face
from pytorch_accelerated.huggingface.events.callbacks import is_ours
from pytorch_accelerated.huggingface.events.state import CONTROL_FLAGS
from pytorch_accelerated.processes.ranks import Ranks


class Events:
    """Calls callbacks with the arguments, the state and the control of a trainer, all of which scripts may replace."""

    def __init__(self, watched: Face) -> None:
        self._watched = watched
        self._is_agreed = False  # by the ranks, since the last event

    def fire(self, event: str, **values: Any) -> None:
        """Call the callbacks for `event`."""
        watched = self._watched
        control = watched.callback_handler.fire(event, watched.args, watched.state, watched.control, **values)
        watched.control = control  # one that a callback has returned takes the place of the other
        self._is_agreed = False

    def listens_to(self, event: str) -> bool:
        """Whether any callback does something at `event`."""
        return self._watched.callback_handler.listens_to(event)

    def ranks_agree_after_each_update(self) -> bool:
        """Whether callbacks or methods of the user may request something on one rank alone."""
        return self._watched.callback_handler.ranks_agree_after_each_update() or not is_ours(self._watched)

    def agree(self, ranks: Ranks) -> None:
        """Set each flag of the control that any rank has set. Must be called by all ranks, before acting on flags."""
        if not self._is_agreed:
            flags = vars(self._watched.control)
            everyones = ranks.exchange_numbers([bool(flags[name]) for name in CONTROL_FLAGS])
            for name, asked in zip(CONTROL_FLAGS, zip(*everyones, strict=True), strict=True):
                if any(asked):
                    flags[name] = True
            self._is_agreed = True

    def close_displays(self) -> None:
        """Close progress bars and log files after an exception, for which callbacks have no event."""
        for callback in self._watched.callback_handler.callbacks:
            close = getattr(callback, "close", None)
            if callable(close) and is_ours(callback):
                close()
