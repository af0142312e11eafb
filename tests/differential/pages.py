"""The two pages that the suite writes: what differs, for people who change over, and what was seen."""

import difflib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.differential.both import VERSION, observations
from tests.differential.comparing import Finding, differences
from tests.differential.differences import SECTIONS, explanation
from tests.support.processes import REPOSITORY

MIGRATION_PAGE = REPOSITORY / "docs" / "migration.md"
OBSERVATIONS_PAGE = REPOSITORY / "benchmarks" / "results" / "differential.md"
_LONGEST = 90

_HEAD = f"""\
# Coming from pytorch-accelerated {VERSION}

Scripts written for version {VERSION} and earlier run as they are: names, arguments, callbacks, events and metrics are
the same. This page is for the day you change the library under a script that works. Read the next section, then look
through the tables for the features you use.

## Before you start

**Importing seeds nothing.** Version {VERSION} seeds Python, numpy and torch with 42 when it is imported, so scripts got
the same random split each time without asking. This library leaves your generators alone. If your script splits its
data at random, call `set_seed` before the split:

```python
from pytorch_accelerated import set_seed

set_seed(42)
train_set, eval_set = random_split(dataset, [0.8, 0.2])
```

Without it each start of the script draws another split. A run that is resumed would then train on rows that it
evaluated before, and each process of a distributed run would have a split of its own. The library warns about the
first and refuses the second, but only you can fix it.

**Files.** `load_checkpoint` reads the portable checkpoints (`.pt`) of {VERSION}. Its training state folders hold
pickles, which could run code when loaded, so they are refused: finish such a run with the old version, or save a
portable checkpoint there and start from that.

**Metrics that are no numbers**, such as a confusion matrix or a dict, may be recorded and stay in the run history.
Tables, files and what `log_metrics` gets hold numbers only; version 0.1.61 passes everything on. A logger that draws
a matrix takes it from `trainer.run_history.get_latest_metric(name)`.

**Numbers.** With one process, no accumulation and no scheduler of the package, a run in the same data order gives the
same weights and the same history. Where a number differs, the tables say why. If you tuned a learning rate around one
of the differences (schedules that come one update late, losses divided by the accumulation steps), look at it again.

## What is different on purpose

Written by `make differential`, which drives both versions with the same scripts. Any difference that isn't in these
tables fails the tests.
"""

_OBSERVATIONS_HEAD = f"""\
# What the differential suite saw

Written by `make differential`: the same scripts with version {VERSION} and with this library, in the same environment.
An observation is one value that a script can see. Reasons are in [docs/migration.md](../../docs/migration.md).
"""


def findings() -> list[Finding]:
    """Everything that differs."""
    return list(differences(*observations()))


def migration_page() -> str:
    """The page for people who change over."""
    parts = [_HEAD]
    for title, section in SECTIONS.items():
        rows = [(each.what, each.reference, each.ours, each.reason) for each in section]
        parts.append("\n".join([f"### {title}", "", *_table(("", VERSION, "here", "why"), rows), ""]))
    return "\n".join(parts)


def observations_page() -> str:
    """How many observations there are and how many differ, with an example of each difference."""
    reference, _ = observations()
    found = findings()
    explained = [(finding, explanation(finding)) for finding in found]
    rows = []
    for section in SECTIONS.values():
        for difference in section:
            seen = [finding for finding, reason in explained if reason is difference]
            first = seen[0]
            rows.append((difference.what, str(len(seen)), f"`{first.name}`", *_shown(first)))
    total = sum(1 for _ in _leaves(reference))
    summary = f"{total} observations, {len(found)} of them different, all of them on purpose."
    header = ("difference", "observations", "for example", VERSION, "here")
    return "\n".join([_OBSERVATIONS_HEAD, summary, "", *_table(header, rows), ""])


def _leaves(seen: Any) -> Iterator[Any]:
    if isinstance(seen, dict):
        for value in seen.values():
            yield from _leaves(value)
    else:
        yield seen


def _shown(finding: Finding) -> tuple[str, str]:
    """Both sides in short; of lists of names only where they part."""
    reference, ours = finding.reference, finding.ours
    if all(isinstance(side, list) and side and isinstance(side[0], str) for side in (reference, ours)):
        return _where_names_part(reference, ours)
    return _short(reference), _short(ours)


def _where_names_part(reference: Sequence[str], ours: Sequence[str]) -> tuple[str, str]:
    matcher = difflib.SequenceMatcher(None, reference, ours, autojunk=False)
    for kind, start, end, our_start, our_end in matcher.get_opcodes():
        if kind != "equal":
            before = f"... {reference[start - 1]}, " if start else ""
            return _short(before + ", ".join(reference[start:end])), _short(before + ", ".join(ours[our_start:our_end]))
    return "", ""


def _short(value: Any) -> str:
    text = _text(value)
    return f"`{text if len(text) <= _LONGEST else text[: _LONGEST - 4] + ' ...'}`"


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list):
        return f"[{', '.join(map(_text, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key}: {_text(entry)}' for key, entry in value.items())}}}"
    return str(value)


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    for row in [header, ["---"] * len(header), *rows]:
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |"


def pages() -> dict[Path, str]:
    """The text of each page."""
    return {MIGRATION_PAGE: migration_page(), OBSERVATIONS_PAGE: observations_page()}
