"""The display of a run in a notebook: HTML in the output of the cell, replaced in place.

It has inline styles and no scripts, so that Jupyter, VS Code and Colab show it alike. Text has the colour of the page,
light or dark.
"""

from __future__ import annotations

import html
import multiprocessing
import sys
import time
from collections.abc import Callable, Mapping, Sequence

from pytorch_accelerated.optional import require
from pytorch_accelerated.progress.curves import curves_of
from pytorch_accelerated.progress.formats import format_clock, format_duration, format_number
from pytorch_accelerated.progress.snapshot import Snapshot
from pytorch_accelerated.progress.table import GrowingTable
from pytorch_accelerated.tracking.best import best_record
from pytorch_accelerated.tracking.history import RunHistory
from pytorch_accelerated.tracking.names import role_and_quantity
from pytorch_accelerated.tracking.values import MetricRecord

_SECONDS_BETWEEN_UPDATES = 0.25
# Drawing a run of many epochs takes a while; it gets this share of the time at most.
_SHARE_OF_DRAWING = 0.05
# More rows than this would fill the screen while the run continues, or a saved notebook.
_ROWS_OF_RUNNING = 12
_ROWS_AT_THE_END = 100
_TRAINING = ("train_", "training_")
_BAR = "display:inline-block;width:16em;height:.5em;margin:0 .8em;border-radius:.25em;background:rgba(128,128,128,.3)"
_FILLED = "display:block;height:100%;border-radius:.25em;background:#4c8bf5;width"
_NUMBERS = "font-variant-numeric:tabular-nums"
_CELL = f"padding:.15em .8em;text-align:right;{_NUMBERS}"
_UNBROKEN = "white-space:nowrap"
_RULE = "border-bottom:1px solid rgba(128,128,128,.5)"


def can_display() -> bool:
    """Whether this process is the kernel of a notebook. Those that it forks cannot reach the cell's output."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    is_kernel = shell is not None and "IPKernelApp" in getattr(shell, "config", {})
    return is_kernel and multiprocessing.parent_process() is None


class _Output:
    """A place in the output of the current cell, filled at the first `show` and replaced by later ones."""

    def __init__(self) -> None:
        self._display_id: str | None = None

    def show(self, content: str, text: str) -> None:
        """Show HTML; viewers without it show the text."""
        display = require("IPython.display", extra="notebook", needed_by="The display of a run in a notebook")
        data = {"text/html": content, "text/plain": text}
        if self._display_id is None:
            self._display_id = display.display(data, raw=True, display_id=True).display_id
        else:
            display.update_display(data, raw=True, display_id=self._display_id)


class NotebookBar:
    """The bar of a pass outside of a training run. It ends as one line; a quick pass shows nothing."""

    def __init__(self) -> None:
        self._output = _Output()
        self._last: Snapshot | None = None
        self._started = 0.0

    def start(self, now: float) -> float:
        """A quick pass ends before its bar appears, so nothing flickers."""
        self._started = now
        return now + _SECONDS_BETWEEN_UPDATES

    def show(self, snapshot: Snapshot, now: float) -> float:
        """Draw the bar."""
        self._last = snapshot
        self._output.show(_of_bar(snapshot), snapshot.label)
        return now + _SECONDS_BETWEEN_UPDATES

    def redraw(self) -> None:
        """Nothing clears it."""

    def close(self, done: int) -> None:
        """Replace the bar by a line."""
        if self._last is not None:
            last, self._last = self._last, None
            count = f"{done} of {last.total}" if last.total and done < last.total else f"{done}"
            text = f"{last.label}: {count} {last.unit}, {format_duration(time.perf_counter() - self._started)}"
            self._output.show(f"<div>{html.escape(text)}</div>", text)


class NotebookPage:
    """The display of a training run: bars of what is going on, a table of the epochs, and the curve of the loss.

    It is drawn from the run history, a few times a second at most, and a last time when it is closed.

    Args:
        history: of the run.
        watched: the metrics that callbacks watch, and whether greater is better; see `best_record`.
        clock: returns seconds.
    """

    def __init__(
        self, history: RunHistory, watched: Mapping[str, bool], clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._history = history
        self._watched = watched
        self._clock = clock
        self._output = _Output()
        self._bars: dict[PageBar, Snapshot] = {}
        self._due = 0.0
        self._ended_by = ""
        self._is_closed = False

    def new_bar(self) -> PageBar:
        """The display of a pass within the run."""
        return PageBar(self)

    def update(self, bar: PageBar, snapshot: Snapshot) -> float:
        """Show the progress of a pass. Returns the time of the next update."""
        self._bars[bar] = snapshot
        self.draw_if_due()
        return self._due

    def remove(self, bar: PageBar) -> None:
        """Leave out the bar of a pass that is over, from the next update on."""
        self._bars.pop(bar, None)

    def draw_if_due(self) -> None:
        """Draw the run as it is now, unless that was done a moment ago."""
        now = self._clock()
        if now >= self._due and not self._is_closed:
            self._draw(_ROWS_OF_RUNNING)
            ended = self._clock()
            self._due = max(now + _SECONDS_BETWEEN_UPDATES, ended + (ended - now) / _SHARE_OF_DRAWING)

    def note_end(self, reason: str) -> None:
        """Say below the table why the run ended before it was complete."""
        self._ended_by = reason

    def close(self) -> None:
        """Draw the run as it ended, without bars."""
        if not self._is_closed:
            self._is_closed = True
            self._bars.clear()
            self._draw(_ROWS_AT_THE_END)

    def _draw(self, max_rows: int) -> None:
        records = [record for record in self._history.records if record.is_scalar]
        best = best_record(records, self._watched)
        steps = self._history.step_records
        rows = _rows(records, self._history)
        shown = [place for place in rows if place == _place(best)] if len(rows) > max_rows else []
        shown = [*(place for place in shown if place not in list(rows)[-max_rows:]), *list(rows)[-max_rows:]]
        notes = []
        if best is not None:
            greatest = f"best {best.name}: {format_number(best.value)} in epoch {best.epoch}"
            notes.append(f"\N{BLACK STAR} {greatest}")
        if len(shown) < len(rows):
            notes.append(f"{len(rows) - len(shown)} further rows are in run_history")
        if self._ended_by:
            notes.append(self._ended_by)
        table = _of_table([rows[place] for place in shown], [place == _place(best) for place in shown])
        bars = "".join(map(_of_bar, self._bars.values()))
        curves = curves_of(steps, [record for record in records if role_and_quantity(record.name)[1].endswith("loss")])
        below = "".join(f"<div style='opacity:.8;margin-top:.3em'>{html.escape(note)}</div>" for note in notes)
        content = (
            f"<div style='max-width:75em'>{bars}"
            "<div style='display:flex;flex-wrap:wrap;align-items:flex-start;gap:1em 1.5em;margin-top:.3em'>"
            f"<div style='overflow-x:auto'>{table}{below}</div>{curves}</div></div>"
        )
        plain = GrowingTable(("lr", "time"), columns=120)
        lines = [plain.add_row(rows[place]) for place in shown]
        self._output.show(content, "\n".join([*lines, *notes]) or "Training")


class PageBar:
    """One pass over some data, shown on the page of its run.

    Args:
        page: of the run.
    """

    def __init__(self, page: NotebookPage) -> None:
        self._page = page

    def start(self, now: float) -> float:
        """A pass appears with the next update of the page."""
        return now

    def show(self, snapshot: Snapshot, now: float) -> float:
        """Draw the bar with the rest of the page."""
        return self._page.update(self, snapshot)

    def redraw(self) -> None:
        """Nothing clears it."""

    def close(self, done: int) -> None:
        """Remove the bar."""
        self._page.remove(self)


def _place(record: MetricRecord | None) -> tuple[int, int] | None:
    return None if record is None else (record.epoch, record.update)


def _rows(records: Sequence[MetricRecord], history: RunHistory) -> dict[tuple[int, int], dict[str, str]]:
    """The cells of each row by the names of their columns. A row is an epoch, or an evaluation within one."""
    last_updates = {record.epoch: record.update for record in records}
    seconds = {timing.epoch: timing.seconds for timing in history.timings}
    rates = {record.update: record.learning_rates for record in history.step_records}
    rows: dict[tuple[int, int], dict[str, str]] = {}
    for record in records:
        place = epoch, update = record.epoch, record.update
        if place not in rows:
            rows[place] = {"epoch": f"{epoch} @{update}"}
        if record.name.startswith(_TRAINING) or (update == last_updates[epoch] and epoch < history.current_epoch):
            rows[place]["epoch"] = f"{epoch}"
        rows[place][record.name] = format_number(record.value)
    for (epoch, update), row in rows.items():
        if rates.get(update):
            row["lr"] = f"{rates[update][0]:.2e}"
        if "@" not in row["epoch"] and epoch in seconds:
            row["time"] = format_duration(seconds[epoch])
    return rows


def _of_table(rows: Sequence[Mapping[str, str]], is_best: Sequence[bool]) -> str:
    if not rows:
        return ""
    names = list(dict.fromkeys(name for row in rows for name in row if name not in ("lr", "time")))
    names += [name for name in ("lr", "time") if any(name in row for row in rows)]
    # Long names may be wrapped after an underscore or a slash.
    heads = [html.escape(name).replace("_", "_<wbr>").replace("/", "/<wbr>") for name in names]
    head = "".join(f"<th style='{_CELL};{_RULE};vertical-align:bottom'>{name}</th>" for name in heads)
    body = ""
    for row, best in zip(rows, is_best, strict=True):
        style = f"{_CELL};{_UNBROKEN};font-weight:bold" if best else f"{_CELL};{_UNBROKEN}"
        mark = "\N{BLACK STAR} " if best else ""
        cells = [f"<td style='{style}'>{html.escape(row.get(name, ''))}</td>" for name in names[1:]]
        body += f"<tr><td style='{style}'>{mark}{html.escape(row['epoch'])}</td>{''.join(cells)}</tr>"
    return (
        f"<table style='border-collapse:collapse;margin:0'><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    )


def _of_bar(snapshot: Snapshot) -> str:
    share = min(snapshot.done / snapshot.total, 1.0) if snapshot.total else None
    bar = "" if share is None else f"<span style='{_BAR}'><span style='{_FILLED}:{share:.1%}'></span></span>"
    left = f"{snapshot.time_left} left" if snapshot.time_left else ""
    facts = [f"{name} {value}" for name, value in snapshot.facts.items()]
    words = ", ".join(filter(None, [snapshot.count, format_clock(snapshot.seconds), left, snapshot.throughput, *facts]))
    gap = " " if bar else ": "
    return f"<div style='{_NUMBERS}'>{html.escape(snapshot.label)}{bar or gap}{html.escape(words)}</div>"
