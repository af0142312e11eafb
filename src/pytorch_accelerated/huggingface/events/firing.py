"""Calls the callbacks of a trainer, and keeps the control that they leave."""

from __future__ import annotations

from typing import Any

from pytorch_accelerated.huggingface.engine.face import Face
from pytorch_accelerated.huggingface.events.callbacks import RunEnd, is_ours
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

    def note_end(self, reason: str, skipped_updates: int, num_warnings: int) -> None:
        """Inform the display of how a training ended, which no event does.

        Args:
            reason: why it ended early, or "" for what callbacks of ours know about that.
            skipped_updates, num_warnings: see `RunEnd`.
        """
        ours = [callback for callback in self._watched.callback_handler.callbacks if is_ours(callback)]
        reasons = (getattr(callback, "reason_to_stop", "") for callback in ours)
        end = RunEnd(reason or next(filter(None, reasons), ""), skipped_updates, num_warnings)
        for callback in ours:
            if hasattr(callback, "note_end"):
                callback.note_end(end)

    def close_displays(self) -> None:
        """Close progress bars and log files after an exception, for which callbacks have no event."""
        for callback in self._watched.callback_handler.callbacks:
            close = getattr(callback, "close", None)
            if callable(close) and is_ours(callback):
                close()
