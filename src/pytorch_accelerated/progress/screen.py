"""Text and tables for people: coloured on a terminal if the package `rich` is installed, plain otherwise."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, TextIO

from pytorch_accelerated.errors import MissingDependencyError
from pytorch_accelerated.optional import require

_GAP = "  "
_STYLES = {"ok": "green", "keep": "green", "damaged": "bold red", "delete": "red"}
"""Styles of cells that contain only one of these words."""


@dataclass(frozen=True)
class Table:
    """Rows of text below a header.

    Attributes:
        header: the titles of the columns.
        rows: lists of cells, one per column.
        numbers: the titles of the right-aligned columns.
    """

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    numbers: Collection[str] = ()


class Screen:
    """Shows the results of a command.

    Args:
        file: a terminal or any other text file.
    """

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._console = _console(file)

    def line(self, text: str = "", *, style: str = "") -> None:
        """Show a line of text, styled if possible. It is never truncated."""
        if self._console is None:
            print(text, file=self._file, flush=True)
        else:
            self._console.print(_text(text, style), soft_wrap=True)

    def table(self, table: Table) -> None:
        """Show a table. Cells are wrapped if the terminal is too narrow; elsewhere lines have their full length."""
        is_number = [title in table.numbers for title in table.header]
        if self._console is None:
            print("\n".join(_plain_lines([table.header, *table.rows], is_number)), file=self._file, flush=True)
            return
        styled = _part_of_rich("table").Table(box=None, pad_edge=False, padding=(0, len(_GAP), 0, 0))
        for title, is_right in zip(table.header, is_number, strict=True):
            styled.add_column(_text(title, "bold"), justify="right" if is_right else "left", overflow="fold")
        for row in table.rows:
            styled.add_row(*(_text(cell, _STYLES.get(cell, "")) for cell in row))
        self._console.print(styled)


def printable(text: str) -> str:
    r"""`text` with every control character escaped.

    Otherwise, names in a folder created by somebody else could move the cursor or hide the text above them.

    >>> print(printable("step_1" + chr(27) + "[2J"))
    step_1\x1b[2J
    """
    return "".join(character if character.isprintable() else repr(character)[1:-1] for character in text)


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


def _plain_lines(rows: Sequence[Sequence[str]], is_number: Sequence[bool]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        _GAP.join(
            cell.rjust(width) if is_right else cell.ljust(width)
            for cell, width, is_right in zip(row, widths, is_number, strict=True)
        ).rstrip()
        for row in rows
    ]


def _console(file: TextIO) -> Any:
    """A console that writes in colour to `file`, or None if it is not a terminal or `rich` is not installed."""
    if not file.isatty():
        return None
    try:
        require("rich", extra="rich", needed_by="Colour")
    except MissingDependencyError:
        return None
    return _part_of_rich("console").Console(file=file)


def _text(text: str, style: str) -> Any:
    """Text for `rich`, which then does not interpret markup in it."""
    return _part_of_rich("text").Text(text, style)


def _part_of_rich(name: str) -> Any:
    return require(f"rich.{name}", extra="rich", needed_by="Colour")
