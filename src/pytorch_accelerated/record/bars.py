"""The progress of a pass over some data, and its displays: a bar in a terminal, HTML in a notebook, lines elsewhere."""

from __future__ import annotations

import collections
import math
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

import tqdm

from pytorch_accelerated.ranks.ranks import Ranks
from pytorch_accelerated.record.text import encodable, format_clock, format_rate, is_terminal, printable, show

if TYPE_CHECKING:
    from pytorch_accelerated.extras.notebook import NotebookPage

# Time between refreshes: reading a loss waits for the device.
_SECONDS_BETWEEN_FACTS = 1.0
# The speed is measured over this many refreshes, about 10 seconds of a bar.
_REFRESHES_REMEMBERED = 50
# A bar narrower than this, including its frame, is less useful than the words it displaces.
_MIN_BAR_COLUMNS = 8
# A pass needs no line in its first and last seconds: the output before and after it is enough.
_QUIET_SECONDS = 10


class Display(Protocol):
    """Shows one pass over some data. All times are measured by `time.perf_counter`."""

    def start(self, now: float) -> float:
        """Called when a pass begins. Returns the time of the first `show`."""

    def show(self, progress: Progress, now: float) -> float:
        """Show the progress of the pass. Returns the time of the next `show`."""

    def close(self) -> None:
        """Called when the pass is over. Nothing may stay that later output would overwrite."""


class Progress:
    """One pass over some data. Call `advance` after each batch and `close` at the end.

    Args:
        label: describes the pass, such as "epoch 3/10".
        total: the number of batches in the pass, or None if unknown.
        display: shows the progress.
        samples_per_batch: samples of one batch over all ranks, for the throughput.
        read_facts: returns further text to show; called once a second at most, and may wait for the device.
        done: batches of this pass that were used before the run was resumed.
        unit: the unit that is counted, if not batches.
        clock: returns seconds.

    Attributes:
        done: finished batches of this rank.
        seconds: time since the pass began, at the last `show`.
        batches_per_second: recent speed, or None if there is none yet.
        facts: further text to show, such as the loss so far.
        label, total, samples_per_batch, unit: the arguments.
    """

    def __init__(
        self,
        label: str,
        total: int | None,
        display: Display,
        *,
        samples_per_batch: int | None = None,
        read_facts: Callable[[], Mapping[str, str]] = dict,
        done: int = 0,
        unit: str = "batches",
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.label, self.total, self.samples_per_batch, self.unit = printable(label), total, samples_per_batch, unit
        self.done, self.seconds = done, 0.0
        self.batches_per_second: float | None = None
        self.facts: Mapping[str, str] = {}
        self._started = self._facts_due = clock()
        self._display = display
        self._read_facts = read_facts
        self._clock = clock
        self._show_due = display.start(self._started)
        self._past = collections.deque([(self._started, done)], maxlen=_REFRESHES_REMEMBERED)

    def advance(self) -> None:
        """Count one more batch."""
        self.done += 1
        now = self._clock()
        if now >= self._show_due:
            self._show(now)

    def close(self) -> None:
        """End the pass, finished or not."""
        self._display.close()

    @property
    def count(self) -> str:
        """For example "450/1000"."""
        return f"{self.done} {self.unit}" if self.total is None else f"{self.done}/{self.total}"

    @property
    def percentage(self) -> str:
        """For example "45%"; empty for a stream."""
        return f"{math.floor(100 * self.done / self.total)}%" if self.total else ""

    @property
    def seconds_left(self) -> float | None:
        """The remaining time at the recent speed; None if unknown."""
        if self.total is None or not self.batches_per_second:
            return None
        return max(self.total - self.done, 0) / self.batches_per_second

    @property
    def time_left(self) -> str:
        """For example "01:30"; empty if unknown."""
        return "" if self.seconds_left is None else format_clock(self.seconds_left)

    @property
    def throughput(self) -> str:
        """For example "11680 samples/s", or batches per second if the number of samples is unknown."""
        if not self.batches_per_second:
            return ""
        if self.samples_per_batch is None:
            return f"{format_rate(self.batches_per_second)} {self.unit}/s"
        return f"{format_rate(self.batches_per_second * self.samples_per_batch)} samples/s"

    @property
    def words(self) -> str:
        """For example "00:12 elapsed, 00:15 left, 1200 samples/s, loss 0.4321"."""
        left = f"{self.time_left} left" if self.time_left else ""
        facts = [f"{name} {value}" for name, value in self.facts.items()]
        return ", ".join(filter(None, [f"{format_clock(self.seconds)} elapsed", left, self.throughput, *facts]))

    def _show(self, now: float) -> None:
        if now >= self._facts_due:
            self.facts, self._facts_due = self._read_facts(), now + _SECONDS_BETWEEN_FACTS
        past, done_then = self._past[0]
        self._past.append((now, self.done))
        self.batches_per_second = (self.done - done_then) / (now - past) if now > past else None
        self.seconds = now - self._started
        self._show_due = self._display.show(self, now)


class _Bar(tqdm.tqdm):  # type: ignore[misc]  # it has no types
    monitor_interval = 0  # no thread that would outlive the run: we keep the time ourselves


class BarDisplay:
    """A progress bar in a terminal that disappears at the end of the pass."""

    seconds_between_refreshes = 0.2

    def __init__(self) -> None:
        self._bar: Any = None

    def start(self, now: float) -> float:
        """A quick pass ends before its bar appears, so nothing flickers."""
        return now + self.seconds_between_refreshes

    def show(self, progress: Progress, now: float) -> float:
        """Draw the bar."""
        if self._bar is None:
            options = {"total": progress.total, "initial": progress.done, "leave": False, "dynamic_ncols": True}
            self._bar = _Bar(bar_format=self._text(progress), **options)
        self._bar.bar_format = self._text(progress)
        self._bar.n = progress.done
        self._bar.refresh()
        return now + self.seconds_between_refreshes

    def close(self) -> None:
        """Remove the bar from the screen."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def _text(self, progress: Progress) -> str:
        columns = getattr(self._bar, "ncols", None)  # None if TQDM_DISABLE is set
        return encodable(bar_format(progress, columns if isinstance(columns, int) else None), sys.stderr)


def bar_format(progress: Progress, columns: int | None) -> str:
    """The text of a bar in tqdm's format language, with as many words as leave room for a bar."""
    head = f"{progress.label} {progress.percentage:>4}" if progress.total else f"{progress.label} {progress.count}"
    times = format_clock(progress.seconds) + (f"<{progress.time_left}" if progress.time_left else "")
    facts = [f"{name}={value}" for name, value in progress.facts.items()]
    words = [times, progress.throughput, *facts]
    for count, brackets in (
        (f"{progress.count} " if progress.total else "", words),
        ("", words),
        ("", [times, progress.throughput, *facts[:1]]),
        ("", [times, *facts[:1]]),
    ):
        tail = f"{count}[{', '.join(filter(None, brackets))}]"
        if columns is None or len(head) + len(tail) + _MIN_BAR_COLUMNS <= columns:
            break
    return _literal(head) + ("|{bar}| " if progress.total else " ") + _literal(tail)  # tqdm cuts it off if need be


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
        self._run_start = math.inf
        self._earliest = 0.0

    def start(self, now: float) -> float:
        """The first line is not due yet."""
        self._run_start = min(self._run_start, now)
        return max(now + _QUIET_SECONDS, self._earliest)

    def show(self, progress: Progress, now: float) -> float:
        """Print a line. The next one follows after a tenth of the time so far, but after 30 seconds to 10 minutes."""
        if progress.seconds_left is not None and progress.seconds_left < _QUIET_SECONDS:
            return now + _QUIET_SECONDS
        if now >= self._earliest:
            count = f"{progress.percentage} ({progress.count})" if progress.total else progress.count
            self._write(f"{progress.label}: {count}, {progress.words}")
            self._earliest = now + min(max((now - self._run_start) / 10, 30), 600)
        return self._earliest

    def close(self) -> None:
        """Lines stay."""


def new_page(minor_names: Iterable[str] = ()) -> NotebookPage | None:
    """A display in the output of the current cell of a notebook; None if this process is not its kernel.

    Processes that the kernel forks cannot reach the cell's output.
    """
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    if "IPKernelApp" not in getattr(shell, "config", {}) or multiprocessing.parent_process() is not None:
        return None
    from pytorch_accelerated.extras.notebook import NotebookPage

    return NotebookPage(minor_names)


def new_display(lines: LineDisplay) -> Display:
    """The right kind of display for a pass, also for a nested one.

    Args:
        lines: of the run, for where neither a notebook nor a terminal shows bars.
    """
    page = new_page()
    if page is not None:
        return page.new_bar(is_alone=True)
    # Bars go to stderr, so that `python train.py > log.txt` shows them but keeps them out of the log.
    return BarDisplay() if is_terminal(sys.stderr) and os.environ.get("TERM") != "dumb" else lines


def print_above_bars(ranks: Ranks, *args: Any, **kwargs: Any) -> None:
    """`print` on the first process of each node, above the progress bars; see `show`."""
    if ranks.is_first_of_node:
        show(*args, **kwargs)
