"""Text for people: numbers, durations and tables, and the one way onto the screen.

Everything that is printed goes through here, because a run must not end for a character that its screen lacks.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import sys
import textwrap
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import tqdm

from pytorch_accelerated.facts.optional import require

_GAP = "  "
_ROWS_BELOW_A_HEADER = 30
# Room for durations of up to an hour, because they get longer from row to row.
_MIN_COLUMNS = 5
# Room for common values with their sign: 1.000, 0.9950, -12.50, 1234567.
_MIN_VALUE_COLUMNS = 7
# Names are wrapped to this width when space is short; `format_number` never needs more.
_WRAPPED_COLUMNS = 10


def format_number(value: float) -> str:
    """A number with four significant digits, at most 10 characters wide below 1e100.

    >>> [format_number(value) for value in (0.123456, 1.0, 0.0, 12345.6, 1e-9, -123456789)]
    ['0.1235', '1.000', '0.000', '12346', '1.000e-09', '-1.235e+08']
    """
    size = abs(value)
    if size == 0 or 1e-3 <= size < 1000:
        return f"{value:#.4g}"
    if 1000 <= size < 1e7:
        return f"{value:.0f}"
    return f"{value:.3e}"


def format_numbers(values: Sequence[float], most: int = 8) -> str:
    """The first numbers of a sequence, whole ones in full.

    >>> format_numbers([1, 2.5, 3], most=2)
    '1, 2.500, ...'
    """
    shown = [format_number(value) if isinstance(value, float) else str(value) for value in values[:most]]
    return ", ".join([*shown, "..."] if len(values) > most else shown)


def format_rate(value: float) -> str:
    """How many a second: a whole number, unless it is small.

    >>> [format_rate(value) for value in (0.1234, 5.0, 121.4, 12345.6)]
    ['0.1234', '5.00', '121', '12346']
    """
    return f"{value:.0f}" if value >= 99.5 else f"{value:#.3g}" if value >= 1 else format_number(value)


def format_clock(seconds: float) -> str:
    """A running time, as on a clock.

    >>> [format_clock(seconds) for seconds in (7.9, 90, 3725)]
    ['00:07', '01:30', '1:02:05']
    """
    return str(tqdm.tqdm.format_interval(seconds))


def format_duration(seconds: float) -> str:
    """The duration of something finished.

    >>> [format_duration(seconds) for seconds in (0.0042, 7.94, 90, 3725)]
    ['4ms', '7.9s', '01:30', '1:02:05']
    """
    if seconds < 0.9995:
        return f"{1000 * seconds:.0f}ms"
    return f"{seconds:.1f}s" if seconds < 59.95 else format_clock(round(seconds))


def format_count(count: int, word: str, words: str | None = None) -> str:
    """A count with its unit: `word`, or `words` for more than one.

    >>> [format_count(1, "update"), format_count(2, "update"), format_count(2, "batch", "batches")]
    ['1 update', '2 updates', '2 batches']
    """
    return f"{count} {word if count == 1 else words or word + 's'}"


def format_update_size(per_device: int, accumulated: int, processes: int, lanes: int | None = None) -> str:
    """The number of samples in an update, and how it comes about.

    >>> [format_update_size(8, 1, 1), format_update_size(8, 4, 2), format_update_size(8, 1, 2, lanes=4)]
    ['8 samples each', '64 samples each (8 x 4 accumulated x 2 processes)', '32 samples each (8 x 4 lanes)']
    """
    side_by_side, word = (processes, "processes") if lanes is None else (lanes, "lanes")
    factors = [str(per_device)]
    if accumulated != 1:
        factors.append(f"{accumulated} accumulated")
    if side_by_side != 1:
        factors.append(f"{side_by_side} {word}")
    product = f" ({' x '.join(factors)})" if len(factors) > 1 else ""
    return f"{format_count(per_device * accumulated * side_by_side, 'sample')} each{product}"


def format_bytes(size_bytes: int) -> str:
    """A size with three or four digits.

    >>> [format_bytes(size_bytes) for size_bytes in (0, 999, 1000, 31_249, 2_500_000_000)]
    ['0 B', '999 B', '1.0 kB', '31.2 kB', '2.5 GB']
    """
    size, unit = float(size_bytes), "B"
    for larger_unit in ("kB", "MB", "GB", "TB"):
        if size < 999.95:
            break
        size, unit = size / 1000, larger_unit
    return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"


def show(*args: Any, **kwargs: Any) -> None:
    """`print` above the bars on the screen. What the stream cannot hold is escaped, and a stream that fails is ignored.

    The text may be the user's own, so control characters stay; see `printable`.
    """
    file = kwargs.get("file") or sys.stdout
    with contextlib.suppress(OSError, ValueError), tqdm.tqdm.external_write_mode():
        print(*(encodable(str(each), file) for each in args), **{"flush": True, **kwargs})


def encodable(text: str, file: Any) -> str:
    """`text` with escapes in place of what the encoding of `file` lacks."""
    encoding = getattr(file, "encoding", None) or "utf-8"
    return text.encode(encoding, "backslashreplace").decode(encoding)


def is_terminal(stream: Any) -> bool:
    """Whether a stream is a terminal; not if it is closed, or no whole file."""
    try:
        return bool(stream.isatty())
    except (AttributeError, ValueError):
        return False


def aligned(rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> list[str]:
    """The rows of a table as lines, each column as wide as its widest cell.

    >>> aligned([("name", "size"), ("a", "12")], right=[1])
    ['name  size', 'a       12']

    Args:
        rows: the cells of each row.
        right: the columns whose cells are at the right.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    sides = [str.rjust if place in right else str.ljust for place in range(len(widths))]
    return [
        _GAP.join(side(cell, width) for side, cell, width in zip(sides, row, widths, strict=True)).rstrip()
        for row in rows
    ]


def table_of_rows(rows: Iterable[Mapping[str, str]]) -> str:
    """The HTML of a table of texts by column, for `_repr_html_`."""
    rows = list(rows)
    columns = list(dict.fromkeys(name for row in rows for name in row))
    cells = [[row.get(name, "") for name in columns] for row in rows]
    notebook = require("pytorch_accelerated.extras.notebook", needed_by="A table in a notebook")
    return notebook.table_html(columns, cells, [False] * len(cells))  # type: ignore[no-any-return]


def printable(text: str, *, keep: str = "") -> str:
    r"""`text` with every control character escaped but those in `keep`.

    Otherwise, names in a folder created by somebody else could move the cursor or hide the text above them.

    >>> print(printable("step_1" + chr(27) + "[2J"))
    step_1\x1b[2J
    """
    return "".join(each if each.isprintable() or each in keep else repr(each)[1:-1] for each in text)


class GrowingTable:
    """Formats rows as aligned text, one at a time.

    Columns appear in the order in which their names are first seen, and stay. The header is repeated when the columns
    change and every 30 rows. If a row is too wide for the screen, names are wrapped; if that is not enough, a terminal
    shows as many columns as there is room for, from the left, and a line names the others. Files and pipes have all.

    Args:
        minor_names: names of columns that stay at the right.
        columns: width of the screen in characters; by default it is determined for each row, since windows can be
            resized.
    """

    def __init__(self, minor_names: Iterable[str] = (), *, columns: int | None = None) -> None:
        self._minor_names = tuple(minor_names)
        self._columns = columns
        self._value_widths: dict[str, int] = {}
        self._header: list[str] = []
        self._rows_below_header = 0

    @property
    def names(self) -> list[str]:
        """The columns, in the order in which they are shown."""
        major = [name for name in self._value_widths if name not in self._minor_names]
        return major + [name for name in self._minor_names if name in self._value_widths]

    def add_row(self, cells: Mapping[str, str]) -> str:
        """The row as text of one or more lines, below the header if it is due.

        Args:
            cells: the values by column name; the first is the title of the row.
        """
        cells = _printable(cells)
        title, *_ = cells
        for name, value in cells.items():
            room = _MIN_COLUMNS if name == title or name in self._minor_names else _MIN_VALUE_COLUMNS
            self._value_widths[name] = max(self._value_widths.get(name, room), len(value))
        columns = self._columns or screen_columns()
        for names in ({name: [name] for name in self.names}, {name: _wrap(name) for name in self.names}):
            widths = {name: max(self._value_widths[name], *map(len, lines)) for name, lines in names.items()}
            if _width(widths) <= columns:
                break
        left_out: list[str] = []
        while _width(widths) > columns and len(widths) > 1 and (self._columns or is_terminal(sys.stdout)):
            left_out.insert(0, widths.popitem()[0])
        names = {name: names[name] for name in widths}
        return "\n".join([*self._due_header(names, widths, _not_shown(left_out, columns)), _line(cells, widths)])

    def _due_header(self, names: Mapping[str, list[str]], widths: Mapping[str, int], notes: list[str]) -> list[str]:
        height = max(map(len, names.values()))
        padded = {name: [""] * (height - len(lines)) + lines for name, lines in names.items()}
        header = [*notes, *(_line({name: lines[i] for name, lines in padded.items()}, widths) for i in range(height))]
        header.append(_line({name: "-" * width for name, width in widths.items()}, widths))
        if header == self._header and self._rows_below_header < _ROWS_BELOW_A_HEADER:
            self._rows_below_header += 1
            return []
        space_above = [""] if self._header else []
        self._header = header
        self._rows_below_header = 1
        return space_above + header


def block(cells: Mapping[str, str], *, columns: int, indent: str = "") -> list[str]:
    """Names and values on one line, or on as many aligned lines as needed."""
    cells = _printable(cells)
    line = indent + ", ".join(f"{name} {value}" for name, value in cells.items())
    if len(line) <= columns:
        return [line]
    name_width = max(map(len, cells))
    value_width = max(map(len, cells.values()))
    entries = [f"{name:<{name_width}} {value:>{value_width}}" for name, value in cells.items()]
    per_line = max((columns - len(indent) + len(_GAP)) // (len(entries[0]) + len(_GAP)), 1)
    return [indent + _GAP.join(entries[i : i + per_line]) for i in range(0, len(entries), per_line)]


def folded(text: str) -> str:
    """`text` with line breaks between words if it is too wide for the terminal; of any width in files and pipes.

    Words stay whole, so that a path can be copied. Control characters are escaped.
    """
    text = printable(text, keep="\n")
    if not is_terminal(sys.stdout):
        return text
    wrapper = textwrap.TextWrapper(
        screen_columns(), subsequent_indent=_GAP, break_long_words=False, break_on_hyphens=False
    )
    return "\n".join(wrapper.fill(line) for line in text.splitlines())


def screen_columns() -> int:
    """The width of the terminal, or 100 characters if there is none."""
    return shutil.get_terminal_size(fallback=(100, 24)).columns


def _printable(cells: Mapping[str, str]) -> dict[str, str]:
    return {printable(name): printable(value) for name, value in cells.items()}


def _line(texts: Mapping[str, str], widths: Mapping[str, int]) -> str:
    return _GAP.join(texts.get(name, "").rjust(width) for name, width in widths.items()).rstrip()


def _width(widths: Mapping[str, int]) -> int:
    return sum(widths.values()) + len(_GAP) * (len(widths) - 1)


def _not_shown(names: Sequence[str], columns: int) -> list[str]:
    """A line that names the columns for which there is no room, as far as there is room for that."""
    text = f"No room here for {format_count(len(names), 'column')}: {', '.join(names)}"
    return [textwrap.shorten(text, columns, placeholder=" ...")] if names else []


def _wrap(name: str) -> list[str]:
    lines = [""]
    # After an underscore or a slash, and before a capital inside a word.
    for piece in re.split(r"(?<=[_/])|(?<=[a-z])(?=[A-Z])", name):
        if lines[-1] and len(lines[-1] + piece) > _WRAPPED_COLUMNS:
            lines.append("")
        lines[-1] += piece
    return lines
