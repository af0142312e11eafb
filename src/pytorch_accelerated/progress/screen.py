"""Text and tables for people.

Everything that is printed goes through here, because a run must not end for a character that its screen lacks.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Collection, Sequence
from typing import Any, TextIO

import tqdm

_GAP = "  "


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


class Screen:
    """Shows the results of a command.

    Args:
        file: a terminal or any other text file.
    """

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def line(self, text: str = "") -> None:
        """Show a line of text, which is never truncated."""
        print(encodable(printable(text), self._file), file=self._file, flush=True)

    def table(self, header: Sequence[str], rows: Sequence[Sequence[str]], numbers: Collection[str] = ()) -> None:
        """Show rows of text below a header, in lines of their full length; columns of `numbers` are right-aligned."""
        right = [place for place, title in enumerate(header) if title in numbers]
        for line in aligned([header, *([printable(cell) for cell in row] for row in rows)], right):
            self.line(line)


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


def printable(text: str, *, keep: str = "") -> str:
    r"""`text` with every control character escaped but those in `keep`.

    Otherwise, names in a folder created by somebody else could move the cursor or hide the text above them.

    >>> print(printable("step_1" + chr(27) + "[2J"))
    step_1\x1b[2J
    """
    return "".join(each if each.isprintable() or each in keep else repr(each)[1:-1] for each in text)


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
