"""Tables of facts for notebooks: plain HTML with inline styles, in the colours of the page."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence

_CELL = "padding:.1em .8em .1em 0;text-align:left;vertical-align:top"


def html_of_facts(title: str, rows: Iterable[Sequence[str]], header: Sequence[str] = ()) -> str:
    """A title above a table; all text is escaped.

    >>> html_of_facts("<Run>", [])
    '<div><b>&lt;Run&gt;</b></div>'

    Args:
        title: of the table.
        rows: the cells of each row.
        header: the titles of the columns, if they need any.
    """
    lines = [_row("th", header)] if header else []
    lines += [_row("td", row) for row in rows]
    table = f"<table style='border-collapse:collapse;margin:.3em 0 0'>{''.join(lines)}</table>" if lines else ""
    return f"<div><b>{html.escape(title)}</b>{table}</div>"


def _row(kind: str, cells: Sequence[str]) -> str:
    return f"<tr>{''.join(f'<{kind} style={_CELL!r}>{html.escape(cell)}</{kind}>' for cell in cells)}</tr>"
