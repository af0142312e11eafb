"""Displays of progress: a bar in a terminal, HTML in a notebook, lines everywhere else."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from typing import Any

import tqdm

from pytorch_accelerated.processes.ranks import Ranks
from pytorch_accelerated.progress.formats import format_clock
from pytorch_accelerated.progress.notebook import PageBar, can_display
from pytorch_accelerated.progress.progress import Display, Snapshot
from pytorch_accelerated.progress.screen import encodable, is_terminal, show

# A bar narrower than this, including its frame, is less useful than the words it displaces.
_MIN_BAR_COLUMNS = 8
# A pass needs no line in its first and last seconds: the output before and after it is enough.
_QUIET_SECONDS = 10


class BarDisplay:
    """A progress bar in a terminal that disappears at the end of the pass."""

    seconds_between_refreshes = 0.2

    def __init__(self) -> None:
        # Disables tqdm's monitor, a thread that would outlive the run: we keep the time ourselves.
        self._bar_class: Any = type("Bar", (tqdm.tqdm,), {"monitor_interval": 0})
        self._bar: Any = None

    def start(self, now: float) -> float:
        """A quick pass ends before its bar appears, so nothing flickers."""
        return now + self.seconds_between_refreshes

    def show(self, snapshot: Snapshot, now: float) -> float:
        """Draw the bar."""
        if self._bar is None:
            options = {"total": snapshot.total, "initial": snapshot.done, "leave": False, "dynamic_ncols": True}
            self._bar = self._bar_class(bar_format=self._text(snapshot), **options)
        self._bar.bar_format = self._text(snapshot)
        self._bar.n = snapshot.done
        self._bar.refresh()
        return now + self.seconds_between_refreshes

    def close(self, done: int) -> None:
        """Remove the bar from the screen."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def _text(self, snapshot: Snapshot) -> str:
        columns = getattr(self._bar, "ncols", None)  # None if TQDM_DISABLE is set
        return encodable(bar_format(snapshot, columns if isinstance(columns, int) else None), sys.stderr)


def bar_format(snapshot: Snapshot, columns: int | None) -> str:
    """The text of a bar in tqdm's format language, with as many words as leave room for a bar."""
    head = f"{snapshot.label} {snapshot.percentage:>4}" if snapshot.total else f"{snapshot.label} {snapshot.count}"
    times = format_clock(snapshot.seconds) + (f"<{snapshot.time_left}" if snapshot.time_left else "")
    facts = [f"{name}={value}" for name, value in snapshot.facts.items()]
    words = [times, snapshot.throughput, *facts]
    for count, brackets in (
        (f"{snapshot.count} " if snapshot.total else "", words),
        ("", words),
        ("", [times, snapshot.throughput, *facts[:1]]),
        ("", [times, *facts[:1]]),
    ):
        tail = f"{count}[{', '.join(filter(None, brackets))}]"
        if columns is None or len(head) + len(tail) + _MIN_BAR_COLUMNS <= columns:
            return _literal(head) + ("|{bar}| " if snapshot.total else " ") + _literal(tail)
    left = f"{snapshot.time_left} left" if snapshot.time_left else ""
    return _literal(f"{head} {', '.join(filter(None, [left, *facts[:1]]))}")


def _literal(text: str) -> str:
    return text.replace("{", "{{").replace("}", "}}")


class LineDisplay:
    """Lines for logs, files and pipes: the first after 10 seconds, then less and less often.

    There are none in the first and last 10 seconds of a pass, so none at all for a quick one. One object serves all
    passes of a run, because the interval depends on the whole run.

    Args:
        write: prints one line.
    """

    def __init__(self, write: Callable[[str], object]) -> None:
        self._write = write
        self._run_start: float | None = None
        self._earliest = 0.0

    def start(self, now: float) -> float:
        """The first line is not due yet."""
        if self._run_start is None:
            self._run_start = now
        return max(now + _QUIET_SECONDS, self._earliest)

    def show(self, snapshot: Snapshot, now: float) -> float:
        """Print a line. The next one follows after a tenth of the time so far, but after 30 seconds to 10 minutes."""
        if snapshot.seconds_left is not None and snapshot.seconds_left < _QUIET_SECONDS:
            return now + _QUIET_SECONDS
        if now >= self._earliest:
            self._write(line_of(snapshot))
            run_seconds = now - self._run_start if self._run_start is not None else 0
            self._earliest = now + min(max(run_seconds / 10, 30), 600)
        return self._earliest

    def close(self, done: int) -> None:
        """Lines stay."""


def line_of(snapshot: Snapshot) -> str:
    """For example "epoch 3/10: 45% (450/1000), 00:12 elapsed, 00:15 left, 1200 samples/s, loss 0.4321"."""
    count = f"{snapshot.percentage} ({snapshot.count})" if snapshot.total else snapshot.count
    left = f"{snapshot.time_left} left" if snapshot.time_left else ""
    facts = [f"{name} {value}" for name, value in snapshot.facts.items()]
    parts = [count, f"{format_clock(snapshot.seconds)} elapsed", left, snapshot.throughput, *facts]
    return f"{snapshot.label}: {', '.join(filter(None, parts))}"


def display_factory(write: Callable[[str], object]) -> Callable[[], Display]:
    """A function that creates the right kind of display for each pass of a run, also for nested passes.

    Args:
        write: prints one line, if bars cannot be shown.
    """
    if can_display():
        return PageBar
    # Bars go to stderr, so that `python train.py > log.txt` shows them but keeps them out of the log.
    if is_terminal(sys.stderr) and os.environ.get("TERM") != "dumb":
        return BarDisplay
    return functools.partial(_same, LineDisplay(write))


def _same(display: Display) -> Display:
    return display


def print_above_bars(ranks: Ranks, *args: Any, **kwargs: Any) -> None:
    """`print` on the first process of each node, above the progress bars; see `show`."""
    if ranks.is_first_of_node:
        show(*args, **kwargs)
