"""Signals that ask a process to end: recorded when they arrive, handled where a run can be saved."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from pytorch_accelerated.errors import SignalExit
from pytorch_accelerated.ranks.compat.torch import import_what_exit_imports

# Ctrl-C, the signal of schedulers, the one that Slurm can send before its time limit, and the one of a terminal that is
# closed, which `nohup` has ignored. Windows lacks some.
_NAMES = ("SIGINT", "SIGTERM", "SIGUSR1", "SIGHUP")
_SIGNALS = [getattr(signal, name) for name in _NAMES if hasattr(signal, name)]
# A launcher passes on signals that its processes may have received already: this is not a second request.
_SECONDS_OF_ECHO = 1.0


class SignalWatch:
    """Handles the signals that ask a process to end while its context is active. One run, one watch.

    The first signal is only recorded. A second SIGINT or SIGTERM, more than a second later, has its usual effect.
    Signals that the user handles or ignores are left alone. Outside the main thread, where Python cannot handle
    signals, the watch does nothing.

    Attributes:
        number: the first signal that this process received; 0 if none.
        agreed: the signal that ends the run on all ranks; 0 if none.
        reason: why all ranks stop, in words; "" if `agreed` is 0.
    """

    def __init__(self) -> None:
        self.number = 0
        self.agreed = 0
        self.reason = ""
        self._came_at: float | None = None  # the first SIGINT or SIGTERM
        self._process = 0
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> SignalWatch:
        if threading.current_thread() is threading.main_thread():
            self._process = os.getpid()
            for number in _SIGNALS:
                if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
                    self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for number, previous in self._previous.items():
            if signal.getsignal(number) == self._note:  # otherwise the user has set another one meanwhile
                signal.signal(number, previous)
        is_interrupt = kind is not None and issubclass(kind, KeyboardInterrupt)
        if is_interrupt or signal.SIGINT in (self.number, self.agreed):  # perhaps another rank got it
            import_what_exit_imports()

    def agree(self, per_rank: Sequence[int]) -> bool:
        """Whether any rank received a signal.

        Args:
            per_rank: the `number` of every rank, by rank.
        """
        for rank, number in enumerate(per_rank):
            if number and not self.agreed:
                where = f" to rank {rank} of {len(per_rank)}" if len(per_rank) > 1 else ""
                self.agreed, self.reason = number, f"{signal.Signals(number).name} came{where}."
        return bool(self.agreed)

    def exit(self, saved_to: Path | None = None) -> SignalExit | KeyboardInterrupt:
        """The exception to raise when the run has ended because of a signal.

        Args:
            saved_to: the training state that was saved at the end.
        """
        error = SignalExit(self.agreed or self.number, saved_to)
        # Notebooks and scripts catch it for Ctrl-C. A subclass would not do: only for KeyboardInterrupt itself, Python
        # ends the process as SIGINT would.
        return KeyboardInterrupt(str(error)) if error.signal_number == signal.SIGINT else error

    def _note(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:  # somebody wants to end a forked process
            self._act_as_before(number)
            return
        self.number = self.number or number
        if number not in (signal.SIGINT, signal.SIGTERM):
            return
        now = time.monotonic()
        if self._came_at is None:
            self._came_at = now
        elif now - self._came_at > _SECONDS_OF_ECHO:
            self._act_as_before(number)

    def _act_as_before(self, number: int) -> None:
        signal.signal(number, self._previous[number])
        signal.raise_signal(number)


def leave_to_trainer() -> None:
    """For worker processes of a loader: ignore the signals that `SignalWatch` handles.

    Ctrl-C and schedulers send them to all processes of a job. If the workers ended, the run would fail while the
    trainer waits for a batch, before it can save.
    """
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)
