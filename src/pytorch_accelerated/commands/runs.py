"""The commands that rank and compare runs."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytorch_accelerated.commands.command import Outcome, add_command, print_line, print_table
from pytorch_accelerated.commands.verdict import Verdict, judge
from pytorch_accelerated.errors import ConfigurationError
from pytorch_accelerated.progress.text import format_duration

if TYPE_CHECKING:
    from pytorch_accelerated.report.contents import RunContents


def add_to(topics: Any) -> None:
    """Add ``runs`` and ``compare`` to the topics of the command line."""
    runs = add_command(topics, "runs", _runs, "rank the runs in a folder and below, the best first")
    runs.add_argument("folder", type=Path, metavar="FOLDER", help="a folder of runs, at any depth")
    help = "write a page that shows runs side by side, the best first: curves, best values, and differing settings"
    compare = add_command(topics, "compare", _compare, help)
    help = "a page of ReportCallback, a folder of states, a Hugging Face output folder, or a folder of runs"
    compare.add_argument("runs", nargs="+", type=Path, metavar="RUN", help=help)
    help = "the page to write; default: compare.html, and with --seeds none"
    compare.add_argument("--output", type=Path, metavar="FILE", help=help)
    help = "say whether the runs of the second folder are better than those of the first, paired by their seeds"
    compare.add_argument("--seeds", action="store_true", help=help)
    for command in (runs, compare):
        help = "the best values of which metric count; default: the one that most runs watch"
        command.add_argument("--metric", metavar="NAME", help=help)


def _runs(options: argparse.Namespace) -> Outcome:
    from pytorch_accelerated.report.reading import all_runs, best_first, main_metric

    runs = all_runs(options.folder)
    metric = main_metric(runs, options.metric)
    found = [_values(run, metric) for run in best_first(runs, metric)]
    if found:
        numbers = (f"best {metric}".strip(), "epoch", "updates", "time")
        print_table(("run", "status", *numbers, "path"), [_cells(each) for each in found], numbers=numbers)
    else:
        print_line(f"No runs in {options.folder}.")
    for each in found:
        if each["status"] == "unreadable":
            print_line(f"Unreadable: {each['reason']}")
    return Outcome({"metric": metric or None, "runs": found})


def _values(run: RunContents, metric: str) -> dict[str, Any]:
    """What programs get to know of a run."""
    from pytorch_accelerated.report.reading import best_of

    best, state = best_of(run, metric), run.state
    kept = ("name", "value", "epoch", "update", "greater_is_better")
    return {
        "name": run.name,
        "path": run.source,
        "status": state.get("status"),
        "reason": state.get("detail", ""),
        "best": best and {name: best[name] for name in kept},
        **{name: state.get(name) for name in ("epoch", "updates", "seconds", "updated", "error")},
    }


def _cells(values: dict[str, Any]) -> list[str]:
    best, seconds = values["best"], values["seconds"]
    value, epoch = (f"{best['value']:.6g}", best["epoch"]) if best else (None, None)
    time = None if seconds is None else format_duration(seconds)
    cells = (values["name"], values["status"], value, epoch, values["updates"], time, values["path"])
    return ["-" if cell is None else str(cell) for cell in cells]


def _compare(options: argparse.Namespace) -> Outcome:
    from pytorch_accelerated.report.reading import write_comparison

    values = _judge(options) if options.seeds else {}
    if options.output or not options.seeds:
        values["output"] = options.output or Path("compare.html")
        write_comparison(options.runs, values["output"], options.metric)
        print_line(f"Comparison: {values['output']}")
    return Outcome(values)


def _judge(options: argparse.Namespace) -> dict[str, Any]:
    """Say which of two folders has the better runs, and return the verdict for programs."""
    from pytorch_accelerated.report.reading import all_runs, best_of, main_metric, values_by_seed

    if len(options.runs) != 2:
        raise ConfigurationError(f"--seeds compares two folders of runs, not {len(options.runs)}: compare A B --seeds.")
    sides = [all_runs(place) for place in options.runs]
    runs = [run for side in sides for run in side]
    metric = main_metric(runs, options.metric)
    (first, left_out), (second, left_out_too) = [values_by_seed(side, metric) for side in sides]
    left_out += left_out_too
    for place, alone in zip(options.runs, (first.keys() - second, second.keys() - first), strict=True):
        left_out += [f"{place}: only here is a run with seed {seed}" for seed in sorted(alone)]
    seeds = [seed for seed in first if seed in second]
    if len(seeds) < 2:
        raise ConfigurationError(
            f"A verdict takes two pairs of runs with the same seeds, as one says nothing about noise. Pairs: "
            f"{len(seeds)}. Train both sides with more seeds. Left out: {'; '.join(left_out) or 'none'}."
        )
    for reason in left_out:
        print_line(f"Left out: {reason}")
    greater = any(best["greater_is_better"] for run in runs if (best := best_of(run, metric)))
    verdict = judge([first[seed] for seed in seeds], [second[seed] for seed in seeds], greater_is_better=greater)
    print_line(_sentence(verdict, options.runs, metric, len(seeds)))
    facts = dict(zip(("first", "second"), options.runs, strict=True), metric=metric, greater_is_better=greater)
    pairs = [{"seed": seed, "first": first[seed], "second": second[seed]} for seed in seeds]
    return {**facts, **verdict._asdict(), "pairs": pairs, "left_out": left_out}


def _sentence(verdict: Verdict, sides: Sequence[Path], metric: str, pairs: int) -> str:
    (first, second), means = sides, [f"{mean:.4g}" for mean in verdict.means]
    size = " in each pair" if verdict.margin is None else f" ± {verdict.margin:.2g} (95 %)"
    numbers = f"(mean difference {verdict.difference:.3g}{size}, {pairs} pairs of seeds, p = {verdict.p_value:.2g})"
    if verdict.outcome != "not decided":
        return f"{second} is {verdict.outcome} than {first}: {metric} {means[1]} against {means[0]} {numbers}."
    needed = "More than 100,000" if verdict.pairs_needed is None else f"About {verdict.pairs_needed}"
    text = (
        f"Not decided: {metric} {means[1]} of {second} against {means[0]} of {first} {numbers}. {needed} pairs of seeds"
    )
    return f"{text} would decide a difference of this size (with a probability of 80 %)."
