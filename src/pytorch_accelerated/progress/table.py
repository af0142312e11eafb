"""A table that grows row by row and fits the available width."""

from __future__ import annotations

import re
import shutil
import sys
import textwrap
from collections.abc import Iterable, Mapping

from pytorch_accelerated.progress.screen import is_terminal, printable

_GAP = "  "
_ROWS_BELOW_A_HEADER = 30
# Room for durations of up to an hour, because they get longer from row to row.
_MIN_COLUMNS = 5
# Room for common values with their sign: 1.000, 0.9950, -12.50, 1234567.
_MIN_VALUE_COLUMNS = 7
# Names are wrapped to this width when space is short; `format_number` never needs more.
_WRAPPED_COLUMNS = 10


class GrowingTable:
    """Formats rows as aligned text, one at a time.

    Columns appear in the order in which their names are first seen, and stay. The header is repeated when the columns
    change and every 30 rows. If a row is too wide for the screen, names are wrapped; if that is not enough, the row
    becomes a block of names and values.

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
            cells: the values by column name; the first is the title if the row becomes a block.
        """
        cells = _printable(cells)
        title, *_ = cells
        for name, value in cells.items():
            self._widen(name, len(value), is_narrow=name == title)
        columns = self._columns or screen_columns()
        for names in ({name: [name] for name in self.names}, {name: _wrap(name) for name in self.names}):
            widths = {name: max(self._value_widths[name], *map(len, lines)) for name, lines in names.items()}
            if sum(widths.values()) + len(_GAP) * (len(widths) - 1) <= columns:
                return "\n".join([*self._due_header(names, widths), _line(cells, widths)])
        rest = {name: value.rstrip() for name, value in cells.items() if name != title}
        return "\n".join([f"{title} {cells[title]}", *block(rest, columns=columns, indent=_GAP)])

    def expect(self, title: str, names: Iterable[str]) -> None:
        """Give columns their place before the first row has them, so that the header need not be repeated for them.

        Args:
            title: the first column.
            names: the others.
        """
        for name in (title, *map(printable, names)):
            self._widen(name, 0, is_narrow=name == title)

    def _widen(self, name: str, width: int, *, is_narrow: bool) -> None:
        room = _MIN_COLUMNS if is_narrow or name in self._minor_names else _MIN_VALUE_COLUMNS
        self._value_widths[name] = max(self._value_widths.get(name, room), width)

    def _due_header(self, names: Mapping[str, list[str]], widths: Mapping[str, int]) -> list[str]:
        height = max(map(len, names.values()))
        padded = {name: [""] * (height - len(lines)) + lines for name, lines in names.items()}
        header = [_line({name: lines[i] for name, lines in padded.items()}, widths) for i in range(height)]
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


def _wrap(name: str) -> list[str]:
    lines = [""]
    # After an underscore or a slash, and before a capital inside a word.
    for piece in re.split(r"(?<=[_/])|(?<=[a-z])(?=[A-Z])", name):
        if lines[-1] and len(lines[-1] + piece) > _WRAPPED_COLUMNS:
            lines.append("")
        lines[-1] += piece
    return lines
