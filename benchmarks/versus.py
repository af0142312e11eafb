"""States of this library in turn: ``python -m benchmarks.versus LABEL=CHECKOUT ... [--cases CASE ...] [--rounds N]``.

Every round measures each case once with the source of each checkout and of this one, in fresh processes, with the loop
by hand beside it in the same process. All run the cases of this checkout. The table is written after each round.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

from benchmarks.cases import CASES
from benchmarks.measuring import Result
from benchmarks.reporting import compared_text, facts_of_run, number, row_of

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "versus.md"
CASES_BY_DEFAULT = ("epoch", "ordinary", "face", "bert", "long_step", "ddp", "checkpoint", "watched")
Figures = dict[str, list[dict[str, Any]]]


def main() -> None:
    options = _options()
    os.environ.update(OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="", ACCELERATE_USE_CPU="true")
    sources = {**options.old, "now": ROOT}
    rounds: dict[tuple[str, int, str], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    tables: dict[tuple[str, int], dict[str, Any]] = {}
    for round_ in range(options.rounds):
        for case in options.cases:
            for name in reversed(list(sources)) if round_ % 2 else sources:
                for index, table in enumerate(_measured(sources[name], case, quick=options.quick)):
                    tables[case, index] = table
                    for way, figure in _compared(table).items():
                        rounds[case, index, way][name].append(figure)
            print(f"round {round_ + 1}: {case}", flush=True)
        _write(options, rounds, tables, repeats=round_ + 1)


def _write(options: argparse.Namespace, rounds: Any, tables: Any, *, repeats: int) -> None:
    names = [*options.old, "now"]
    command = f"python -m benchmarks.versus {' '.join(f'{label}=...' for label in options.old)}"
    facts = facts_of_run(command=command, repeats=repeats, left_out=[])
    lines = ["# Before and after", "", *(f"- {name}: {value}" for name, value in facts.items())]
    lines += ["", "Medians over the rounds; each figure is compared within its process.", ""]
    heads = ["what", "way", "compared with", *names, "target"]
    lines += [row_of(heads), row_of(["---"] * len(heads))]
    for (case, index, way), figures in rounds.items():
        lines.append(row_of(_row(tables[case, index], way, [figures[name] for name in names])))
    options.output.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"Written to {options.output}")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.versus", description="Compare two states of the library."
    )
    parser.add_argument("old", nargs="+", type=_labelled, metavar="LABEL=CHECKOUT", help="checkouts to compare with")
    parser.add_argument("--cases", nargs="+", metavar="CASE", help=f"default: {', '.join(CASES_BY_DEFAULT)}")
    parser.add_argument("--rounds", type=int, default=5, help="how often each is measured (default: 5)")
    parser.add_argument("--quick", action="store_true", help="small sizes, to check that all runs")
    parser.add_argument("--output", type=Path, default=RESULTS, help="the file to write")
    options = parser.parse_args()
    options.old, options.cases = dict(options.old), options.cases or CASES_BY_DEFAULT
    if unknown := [case for case in options.cases if case not in CASES]:
        parser.error(f"there is no case {unknown[0]!r}")
    return options


def _labelled(text: str) -> tuple[str, Path]:
    label, _, checkout = text.rpartition("=")
    return label or Path(checkout).name, Path(checkout).resolve()


def _measured(checkout: Path, case: str, *, quick: bool) -> list[dict[str, Any]]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(checkout / "src"), str(ROOT)])}
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "benchmarks", case, "--no-peers", "--output", folder]
        command += ["--quick"] if quick else ["--repeats", "1"]
        subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL)
        figures: Figures = json.loads((Path(folder) / "results.json").read_text(encoding="utf-8"))["results"]
    return figures[case]


def _compared(table: dict[str, Any]) -> dict[str, float]:
    """The figures of our ways: compared with the baseline, in processor time where it was measured."""
    result = _as_result(table)
    ours = [way for way in result.rounds if way.startswith("ours")]
    if result.baseline is not None and result.processor_rounds:
        return {way: result.processor_compared(way) for way in ours}
    return {way: result.compared(way) for way in ours}


def _as_result(table: dict[str, Any]) -> Result:
    fields = {"title", "unit", "rounds", "baseline", "compared_as", "processor_rounds"}
    return Result(**{name: value for name, value in table.items() if name in fields})


def _row(table: dict[str, Any], way: str, figures: list[list[float]]) -> list[str]:
    result = _as_result(table)
    medians = map(statistics.median, figures)
    texts = [number(value) if result.baseline is None else compared_text(result, value) for value in medians]
    targets = [target["target"] for target in table["targets"] if target["way"] == way]
    kind = f"{result.baseline}, processor time" if result.processor_rounds else result.baseline or result.unit
    return [result.title, way, kind, *texts, ", ".join(targets)]


if __name__ == "__main__":
    main()
