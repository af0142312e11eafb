"""The rows as a table for readers, on a page of results and in the documentation."""

from __future__ import annotations

import importlib.metadata
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.jobs.jobs import JOBS, LIBRARIES, scripts_of
from benchmarks.jobs.running import Row
from benchmarks.reporting import row_of

ALLOWED = 1  # line more than the best peer
PACKAGES = ("fastai", "fastcore", "jsonargparse", "keras", "optuna", "optuna-integration", "scikit-learn", "timm")


def write(folder: Path, rows: Mapping[str, Row], facts: Mapping[str, Any]) -> None:
    """Write ``jobs.json`` and ``jobs.md`` into `folder`.

    Args:
        folder: for the files.
        rows: by name of script; jobs without a row of ours are left out.
        facts: what one must know to repeat the run.
    """
    folder.mkdir(parents=True, exist_ok=True)
    rows = {script: rows[script] for name in JOBS for script in scripts_of(name) if script in rows}
    stored = {
        **facts,
        "rows": {script: row._replace(complaint=row.complaint[-500:])._asdict() for script, row in rows.items()},
    }
    (folder / "jobs.json").write_text(json.dumps(stored, indent=1) + "\n", encoding="utf-8")
    text = [
        "# Common jobs, line by line",
        "\n".join(f"- {name}: {value}" for name, value in facts.items() if name != "repeats"),
        table(rows),
        summary(rows),
        "Lines are those below `# --- job ---` in `benchmarks/jobs/scripts`, as ruff formats them at 100 columns, "
        "without blank ones and comments; in brackets, how many of them are imports. Every script ran in a fresh "
        "process, and its figure was checked.",
    ]
    (folder / "jobs.md").write_text("\n\n".join(filter(None, text)) + "\n", encoding="utf-8")


def stored_rows(folder: Path) -> dict[str, Row]:
    """The rows of ``jobs.json``, if there is one."""
    path = folder / "jobs.json"
    stored = json.loads(path.read_text(encoding="utf-8"))["rows"] if path.exists() else {}
    return {script: Row(**row) for script, row in stored.items()}


def versions(peers: Path | None) -> str:
    """The versions of packages that `facts_of_run` leaves out."""
    paths = {} if peers is None else {"path": [str(peers)]}
    found = {each.name: each.version for each in importlib.metadata.distributions()}
    found |= {each.name: each.version for each in importlib.metadata.distributions(**paths)} if peers else {}
    return ", ".join(f"{name} {found[name]}" for name in (*PACKAGES, "skorch") if name in found)


def table(rows: Mapping[str, Row]) -> str:
    """A row for each job."""
    lines = [
        row_of(["job", "ours", "best peer", "ours, more or fewer", "ours shows", "the peer shows", "note"]),
        row_of(["---", "---:", "---", "---:", "---", "---", "---"]),
    ]
    for name, job in JOBS.items():
        ours, *peers = scripts_of(name)
        if ours not in rows:
            continue
        difference = difference_of(name, rows)
        shown = sorted((rows[peer].lines, peer) for peer in peers if peer in rows)
        cells = [f"{LIBRARIES[peer.removeprefix(f'{name}_')]} {_lines(rows[peer])}" for _, peer in shown]
        figures = [f"{job.figure} {_figure(rows[ours])}", ", ".join(_figure(rows[peer]) for _, peer in shown)]
        more = "" if difference is None else f"{difference:+d}" if difference else "0"
        more = f"**{more}**" if difference is not None and difference > ALLOWED else more
        lines.append(row_of([job.title, _lines(rows[ours]), ", ".join(cells), more, *figures, job.note]))
    return "\n".join(lines)


def difference_of(name: str, rows: Mapping[str, Row]) -> int | None:
    """How many more lines our script of a job has than the shortest of the others; None without others."""
    ours, *peers = scripts_of(name)
    lines = [rows[peer].lines for peer in peers if peer in rows]
    return rows[ours].lines - min(lines) if lines and ours in rows else None


def summary(rows: Mapping[str, Row]) -> str:
    """How many jobs take fewer, as many or more lines."""
    found = {name: difference_of(name, rows) for name in JOBS}
    differences = {name: difference for name, difference in found.items() if difference is not None}
    if not differences:
        return ""
    longer = [JOBS[name].title for name, difference in differences.items() if difference > ALLOWED]
    fewer = sum(difference < 0 for difference in differences.values())
    text = f"{len(differences)} jobs: {fewer} take fewer lines than with the best peer, "
    text += f"{len(differences) - fewer - len(longer)} as many or one more, {len(longer)} more than that"
    return text + (f": {'; '.join(longer)}." if longer else ".")


def _lines(row: Row) -> str:
    return f"{row.lines} ({row.imports})"


def _figure(row: Row) -> str:
    if row.is_missing:
        return "not run here"
    if row.complaint:
        return "**failed**"
    return f"{row.figure:.3g}"
