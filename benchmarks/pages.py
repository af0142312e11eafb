"""The tables of results on pages: ``python -m benchmarks.pages`` writes them from the files in ``results/``.

A table stands between two comments: ``<!-- table: NAME -->``, with a name from `TABLES`, or
``<!-- benchmark: TITLE -->``, with the beginning of a title in ``results.md``, and ``<!-- end of table -->``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import takewhile
from typing import Any

from benchmarks import summary
from benchmarks.promises import reporting as promises
from benchmarks.reporting import row_of

DOCS = summary.ROOT / "docs"
README = [summary.ROOT / name for name in summary.ROWS]
RESULTS = summary.RESULTS.parent
MARKED = re.compile(r"(<!-- (table|benchmark): (.*?) -->\n).*?(<!-- end of table -->)", re.DOTALL)

# What was done; the beginning of the cases in chaos.json; how often, what to take off; what must not happen.
CHAOS = (
    ("a run killed once, at a random moment", "SIGKILL", "runs killed once", "runs that ended before their kill"),
    ("a run killed again and again: kills", "SIGKILL", "kills in storms", None),
    ("a process that ends before or after one file operation of a save", "SIGKILL", "deaths around an operation", None),
    ("power lost during a save: each disk that could be left", "power loss", "disks", None),
    ("one process of several killed", "rank killed", "deaths", None),
    ("a loader process killed or crashed", "loader process", "deaths", None),
    ("SIGTERM, SIGINT or SIGUSR1 at a random moment", "signals to", "signals that ended a run", None),
    ("a run resumed after one of its updates, with 0 to 4 loader workers", "resume", "updates gone on from", None),
    ("a second run started in the same folder", "two runs in one folder", "second runs", None),
    ("one bit of a training state flipped", "flipped bits", "flips", None),
    ("a file of weights changed at random, ours or torch's", "changed files", "changes", None),
    ("one bit of stored predictions flipped", "flipped bits of stored predictions", "flips", None),
    ("a training state made to attack its reader", "hostile folders", "folders", None),
    ("random sequences of calls", "sequences of calls", "sequences", None),
)
EXACT_CASES = {"flipped bits"}  # other cases begin with the same words
GONE_WRONG = {
    "states lost",
    "runs that ended differently",
    "first runs that ended differently",
    "ended differently",
    "damaged states",
    "states accepted",
    "other contents accepted",
    "stores accepted",
    "programs started",
    "broken promises",
}


def chaos_table(rows: Sequence[tuple[str, str, str, str | None]] = CHAOS) -> str:
    """What was done to runs and files, how often, and how often it went wrong."""
    results = json.loads((RESULTS / "chaos.json").read_text(encoding="utf-8"))
    lines = [row_of(["what was done", "times", "what must not happen: times"]), row_of(["---", "---:", "---"])]
    for label, beginning, counted, taken_off in rows:
        cases = [
            figures
            for case, figures in results.items()
            if (case == beginning if beginning in EXACT_CASES else case.startswith(beginning)) and counted in figures
        ]
        times = sum(figures[counted] - figures.get(taken_off, 0) for figures in cases)
        wrong: dict[str, int] = {}
        for name, number in ((name, number) for figures in cases for name, number in figures.items()):
            if name in GONE_WRONG:
                wrong[name] = wrong.get(name, 0) + number
        lines.append(row_of([label, f"{times:,}", ", ".join(f"{name}: {number}" for name, number in wrong.items())]))
    return "\n".join(lines) + "\n"


def speed_table(page: str) -> str:
    """The table of a README."""
    return summary.table(json.loads(summary.RESULTS.read_text(encoding="utf-8")), page)


def promises_table(language: str) -> str:
    """What each library keeps of what is taken for granted."""
    results = json.loads((RESULTS / "promises.json").read_text(encoding="utf-8"))
    return promises.table(results["answers"], language) + "\n"


def first_table(file: str, columns: Sequence[int], after: str = "") -> str:
    """Some columns of the first table of a file of results, or of the first after some text."""
    lines = (RESULTS / file).read_text(encoding="utf-8").partition(after or "\n")[2].splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith("|"))
    rows = list(takewhile(lambda line: line.startswith("|"), lines[first:]))
    # Scripts of others are no files of ours, which names in backquotes on a page are.
    return "\n".join(row_of([_cells(row)[i].replace("`", "") for i in columns]) for row in rows) + "\n"


def sentence(file: str, beginning: str) -> str:
    """The line of a file of results that begins with a number and continues like this."""
    text = (RESULTS / file).read_text(encoding="utf-8")
    return next(line for line in text.splitlines() if re.match(rf"\d+ {beginning}", line)) + "\n"


SHOWN = (0, 1, 4, 5, 6, 7, 10)  # columns of techniques.md
TABLES: Mapping[str, Callable[[], str]] = {
    "kills": partial(chaos_table, CHAOS[:10]),
    "damage": partial(chaos_table, CHAOS[9:]),
    "differential": partial(sentence, "differential.md", "observations"),
    "find_lr": partial(first_table, "find_lr.md", range(8)),
    "jobs": partial(first_table, "jobs.md", range(7)),
    "jobs, counted": partial(sentence, "jobs.md", "jobs"),
    "promises": partial(promises_table, "en"),
    "promises, zh": partial(promises_table, "zh"),
    "speed": partial(speed_table, "README.md"),
    "speed, zh": partial(speed_table, "README.zh-CN.md"),
    "techniques": partial(first_table, "techniques.md", SHOWN),
    "techniques, fine-tuning": partial(first_table, "techniques.md", SHOWN, "## Fine-tuning"),
    "transformers": partial(first_table, "transformers_scripts.md", (0, 1, 2, 4)),
}


def benchmark_table(title: str) -> str:
    """A table of results without its ranges and processor times: way, median, comparison with the baseline."""
    text = (RESULTS / "results.md").read_text(encoding="utf-8")
    begun = text.index(f"\n### {title}")
    rows = [_cells(line) for line in text[begun:].split("\n\n")[1].splitlines()]
    compared = [i for i, name in enumerate(rows[0]) if name.startswith("against")][:1]
    columns = [0, 1, *compared]
    return "\n".join(row_of([_rounded(row[i]) for i in columns]) for row in rows) + "\n"


def _rounded(cell: str) -> str:
    """A ratio with two decimals: more of them are noise."""
    return f"{float(cell[:-1]):.2f}×" if cell.endswith("×") else cell


def _cells(row: str) -> list[str]:
    return [cell.strip() for cell in row.strip().strip("|").split(" | ")]


def with_tables(text: str) -> str:
    """The text of a page with its tables made anew."""

    def made(match: re.Match[str]) -> str:
        table = TABLES[match[3]]() if match[2] == "table" else benchmark_table(match[3])
        return match[1] + "\n" + re.sub(r"\| (against )?ours\b", r"| \1this library", table) + "\n" + match[4]

    return MARKED.sub(made, text)


def pages() -> dict[Any, str]:
    """The pages with tables of results, and their texts."""
    texts = {path: path.read_text(encoding="utf-8") for path in [*README, *sorted(DOCS.rglob("*.md"))]}
    return {path: text for path, text in texts.items() if MARKED.search(text)}


def main() -> None:
    """Write the tables into the pages."""
    for path, text in pages().items():
        path.write_text(with_tables(text), encoding="utf-8")


if __name__ == "__main__":
    main()
