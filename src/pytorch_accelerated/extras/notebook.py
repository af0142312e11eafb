"""The display of a run in a notebook: HTML in the output of the cell, replaced in place.

It has inline styles and no scripts, so that Jupyter, VS Code and Colab show it alike. Text has the colour of the page,
light or dark.
"""

from __future__ import annotations

import html
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pytorch_accelerated.record.text import GrowingTable, format_duration, format_number

if TYPE_CHECKING:
    from pytorch_accelerated.record import Progress

_SECONDS_BETWEEN_UPDATES = 0.25
# More rows than this would fill the screen while the run continues, or a saved notebook.
_ROWS_OF_RUNNING = 12
_ROWS_AT_THE_END = 100
_POINTS = 200  # of a curve
_BAR = "display:inline-block;width:16em;height:.5em;margin:0 .8em;border-radius:.25em;background:rgba(128,128,128,.3)"
_FILLED = "display:block;height:100%;border-radius:.25em;background:#4c8bf5;width"
_NUMBERS = "font-variant-numeric:tabular-nums"
_CELL = f"padding:.15em .8em;text-align:right;white-space:nowrap;{_NUMBERS}"


class NotebookPage:
    """A place in the output of the current cell, with bars of what is going on and a table below them.

    It is drawn a few times a second at most, and a last time when it is closed, without bars.

    Args:
        minor_names: columns of the table that stay at the right.
    """

    def __init__(self, minor_names: Iterable[str] = ()) -> None:
        self._display_id: str | None = None
        self._bars: dict[PageBar, Progress] = {}
        self._minor_names = tuple(minor_names)
        self._rows: list[Mapping[str, str]] = []
        self._best: Mapping[str, str] | None = None
        self._last_line = ""
        self._losses: Sequence[float] = ()
        self._due = 0.0
        self._is_closed = False

    def new_bar(self, *, is_alone: bool = False) -> PageBar:
        """The display of a pass within the run; or of one that has this page for itself, and ends as a line."""
        return PageBar(self, is_alone=is_alone)

    def add_row(self, cells: Mapping[str, str]) -> None:
        """Add a row to the table. A value that ends with "*" is the best so far; the last such row is bold."""
        self._rows.append(cells)
        if any(value.endswith("*") for value in cells.values()):
            self._best = cells
        self._draw_if_due()

    def update(self, bar: PageBar, progress: Progress) -> float:
        """Show the progress of a pass. Returns the time of the next update."""
        self._bars[bar] = progress
        self._draw_if_due()
        return self._due

    def remove(self, bar: PageBar) -> Progress | None:
        """Leave out the bar of a pass that is over, from the next update on. Returns what it showed last."""
        return self._bars.pop(bar, None)

    def show_losses(self, losses: Sequence[float]) -> None:
        """Draw the training loss so far below the bars, from the next update on."""
        self._losses = losses

    def note_end(self, line: str) -> None:
        """Say below the table how the run ended."""
        self._last_line = line

    def close(self) -> None:
        """Draw the page as it ended, without bars."""
        if not self._is_closed:
            self._is_closed = True
            self._bars.clear()
            self._draw(_ROWS_AT_THE_END)

    def _draw_if_due(self) -> None:
        now = time.perf_counter()
        if now >= self._due and not self._is_closed:
            self._draw(_ROWS_OF_RUNNING)
            self._due = now + _SECONDS_BETWEEN_UPDATES

    def _draw(self, max_rows: int) -> None:
        rows = self._rows[-max_rows:]
        if self._best is not None and self._best not in rows:
            rows.insert(0, self._best)
        table = GrowingTable(self._minor_names, columns=120)
        lines = [table.add_row(row) for row in rows]
        more = len(self._rows) - len(rows)
        notes = [f"{more} further rows are in the run history"] if more else []
        notes += [self._last_line] if self._last_line else []
        cells = [[row.get(name, "") for name in table.names] for row in rows]
        content = [
            *map(_of_bar, self._bars.values()),
            _curve(self._losses),
            table_html(table.names, cells, [row is self._best for row in rows]) if rows else "",
            *(f"<div>{html.escape(note)}</div>" for note in notes),
        ]
        data = {
            "text/html": f"<div style='overflow-x:auto'>{''.join(content)}</div>",
            "text/plain": "\n".join([*lines, *notes]),
        }
        from IPython import display as of_ipython

        display: Any = of_ipython
        if self._display_id is None:
            self._display_id = display.display(data, raw=True, display_id=True).display_id
        else:
            display.update_display(data, raw=True, display_id=self._display_id)


class PageBar:
    """One pass over some data, shown on a page.

    Args:
        page: the page.
        is_alone: whether the page has only this pass, and ends with a line about it.
    """

    def __init__(self, page: NotebookPage, *, is_alone: bool) -> None:
        self._page = page
        self._is_alone = is_alone
        self._started = 0.0

    def start(self, now: float) -> float:
        """A quick pass ends before its bar appears, so nothing flickers."""
        self._started = now
        return now + _SECONDS_BETWEEN_UPDATES

    def show(self, progress: Progress, now: float) -> float:
        """Draw the bar with the rest of the page."""
        return self._page.update(self, progress)

    def close(self) -> None:
        """Remove the bar."""
        last = self._page.remove(self)
        if self._is_alone and last is not None:
            count = f"{last.done} of {last.total}" if last.total and last.done < last.total else f"{last.done}"
            duration = format_duration(time.perf_counter() - self._started)
            self._page.note_end(f"{last.label}: {count} {last.unit}, {duration}")
            self._page.close()


def table_html(header: Iterable[str], rows: Iterable[Iterable[str]], bold: Iterable[bool]) -> str:
    """A table of escaped text, whose titles may be wrapped after an underscore or a slash."""
    heads = [html.escape(name).replace("_", "_<wbr>").replace("/", "/<wbr>") for name in header]
    lines = [_row("th", heads, f"{_CELL};white-space:normal")]
    for row, is_bold in zip(rows, bold, strict=True):
        lines.append(_row("td", map(html.escape, row), f"{_CELL};font-weight:bold" if is_bold else _CELL))
    return f"<table style='border-collapse:collapse;margin:.3em 0 0'>{''.join(lines)}</table>"


def _curve(losses: Sequence[float]) -> str:
    """The training loss as a line, means of neighbours where there is no room for each; empty before two values."""
    size = max(1, len(losses) // _POINTS)
    parts = [losses[start : start + size] for start in range(0, len(losses), size)]
    means = [mean for mean in (sum(part) / len(part) for part in parts) if math.isfinite(mean)]
    if len(means) < 2:
        return ""
    low, width, height = min(means), 420, 64
    scale = height / (max(means) - low or 1)
    places = [(width * i / (len(means) - 1), height - (mean - low) * scale + 3) for i, mean in enumerate(means)]
    points = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    line = f"<polyline points='{points}' fill='none' stroke='#4c8bf5' stroke-width='1.5'/>"
    words = f"training loss {format_number(means[0])} to {format_number(means[-1])}"
    return f"<div>{words}<br><svg width='{width}' height='{height + 6}' role='img'>{line}</svg></div>"


def _row(kind: str, cells: Iterable[str], style: str) -> str:
    return f"<tr>{''.join(f'<{kind} style={style!r}>{cell}</{kind}>' for cell in cells)}</tr>"


def _of_bar(progress: Progress) -> str:
    share = min(progress.done / progress.total, 1.0) if progress.total else None
    bar = "" if share is None else f"<span style='{_BAR}'><span style='{_FILLED}:{share:.1%}'></span></span>"
    words = f"{progress.count}, {progress.words}"
    gap = " " if bar else ": "
    return f"<div style='{_NUMBERS}'>{html.escape(progress.label)}{bar or gap}{html.escape(words)}</div>"
