"""Results as JSON, as Markdown tables and as a picture."""

from __future__ import annotations

import dataclasses
import datetime
import importlib.metadata
import json
import os
import platform
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import pytorch_accelerated
from benchmarks.measuring import Result
from benchmarks.plotting import plot

PACKAGES = (
    *("torch", "accelerate", "numpy"),
    *("pytorch-ignite", "skorch", "lightning", "transformers"),
)


def write_report(folder: Path, results: Mapping[str, Sequence[Result]], facts: Mapping[str, Any]) -> None:
    """Write ``results.json``, ``results.md`` and ``results.png`` into `folder`.

    Args:
        folder: an existing folder.
        results: by case.
        facts: what one must know to repeat the run; see `facts_of_run`.
    """
    as_json = {**facts, "results": {case: [_as_json(result) for result in tables] for case, tables in results.items()}}
    (folder / "results.json").write_text(json.dumps(as_json, indent=1) + "\n", encoding="utf-8")
    parts = ["# Benchmarks", "\n".join(f"- {name}: {value}" for name, value in facts.items())]
    everything = [result for tables in results.values() for result in tables]
    if any(result.is_pictured for result in everything):
        plot([result for result in everything if result.is_pictured], folder / "results.png")
        parts.append("![The main figures](results.png)")
    parts += [_targets_as_markdown(everything), *map(as_markdown, everything)]
    (folder / "results.md").write_text("\n\n".join(filter(None, parts)) + "\n", encoding="utf-8")


def facts_of_run(
    *, command: str, repeats: int, left_out: Sequence[str], packages: Sequence[str] = PACKAGES
) -> dict[str, Any]:
    """The class of machine, the versions, and the command."""
    versions = {name: _version(name) for name in packages}
    shown = [f"{name} {version}" for name, version in versions.items() if version]
    return {
        "date": datetime.date.today().isoformat(),
        "command": command,
        "repeats": repeats,
        "machine": f"{_processor()}, {_cores()} cores, {platform.system()}",
        "threads": torch.get_num_threads(),
        "version": pytorch_accelerated.__version__,
        "versions": ", ".join([f"Python {platform.python_version()}", *shown]),
        **({"left out": ", ".join(left_out)} if left_out else {}),
    }


def as_markdown(result: Result) -> str:
    """The table of a result, best median first."""
    heads = ["way", f"{result.unit}: median", "lowest to highest"]
    if result.baseline is not None:
        heads.append(f"against {result.baseline}")
    heads += [f"processor {result.unit}: median", f"against {result.baseline}"] if result.processor_rounds else []
    heads += ["final loss"] if result.final_losses else []
    rows = []
    for way in result.best_first():
        figures = result.rounds[way]
        row = [way, number(result.median(way)), f"{number(min(figures))} to {number(max(figures))}"]
        if result.baseline is not None:
            row.append(compared_text(result, result.compared(way)))
        if result.processor_rounds:
            row.append(number(statistics.median(result.processor_rounds[way])))
            row.append(compared_text(result, result.processor_compared(way)))
        if result.final_losses:
            loss = result.final_losses.get(way)
            row.append("" if loss is None else f"{loss:.4f}")
        rows.append(row)
    number_of_rounds = len(next(iter(result.rounds.values())))
    lines = [f"### {result.title}", "", row_of(heads), row_of(["---"] * len(heads)), *map(row_of, rows)]
    lines += ["", f"Rounds: {number_of_rounds}. {result.note}".rstrip()]
    return "\n".join(lines)


def compared_text(result: Result, compared: float) -> str:
    """For example "+12.3" or "0.78×"."""
    if result.compared_as == "ratio":
        return f"{compared:.4g}×"
    return f"{'+' if compared >= 0 else '−'}{number(abs(compared))}"


def number(value: float) -> str:
    """A number with four digits, or more before the decimal point."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def row_of(cells: Sequence[str]) -> str:
    """A row of a Markdown table."""
    return f"| {' | '.join(cells)} |"


def _targets_as_markdown(results: Sequence[Result]) -> str:
    """The targets, and whether they were reached."""
    rows = []
    for result in results:
        for target in result.targets:
            verdict = "yes" if result.is_reached(target) else "**no**"
            rows.append(row_of([result.title, target.way, str(target), number(result.compared(target.way)), verdict]))
    if not rows:
        return ""
    heads = ["what", "way", "target", "measured", "reached"]
    return "\n".join(["## Targets", "", row_of(heads), row_of(["---"] * len(heads)), *rows, "", "## Tables"])


def _as_json(result: Result) -> dict[str, Any]:
    fields = {field.name: getattr(result, field.name) for field in dataclasses.fields(result)}
    targets = [
        {
            "way": target.way,
            "target": str(target),
            "measured": result.compared(target.way),
            "is_reached": result.is_reached(target),
        }
        for target in result.targets
    ]
    compared = {way: result.compared(way) for way in result.rounds}
    return {**fields, "targets": targets, "compared": compared, "final_losses": dict(result.final_losses)}


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
