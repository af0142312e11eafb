"""The commands that rank and compare runs, and the statistics: whether one configuration is better than another."""

from __future__ import annotations

import argparse
import bisect
import math
import os
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from pytorch_accelerated.errors import ConfigurationError
from pytorch_accelerated.extras.commands.command import Outcome, add_command, print_line, print_table
from pytorch_accelerated.facts import require
from pytorch_accelerated.record.text import format_duration

if TYPE_CHECKING:
    from pytorch_accelerated.extras.report.contents import RunContents

_SIGNIFICANCE = 0.05
_POWER = 0.8
_MOST_PAIRS = 100_000
_BATCHES = 10
_T_9 = 2.262157162798205  # the 97.5 % quantile of the t distribution with _BATCHES - 1 degrees of freedom
_SAME = 1e-9  # times the values: a smaller spread is one of rounding


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
    from pytorch_accelerated.extras.report.reading import all_runs, best_first, main_metric

    runs = all_runs(options.folder)
    metric = main_metric(runs, options.metric)
    found = [_values(run, metric) for run in best_first(runs, metric)]
    if found:
        numbers = (f"best {metric}".strip(), "epoch", "updates", "time")
        header, rows = (
            ("run", "status", *numbers, "path", "branch of"),
            [_cells(each, options.folder) for each in found],
        )
        shown = len(header) - (not any(each["branch"] for each in found))
        print_table(header[:shown], [row[:shown] for row in rows], numbers=numbers)
    else:
        print_line(f"No runs in {options.folder}.")
    for each in found:
        if each["status"] == "unreadable":
            print_line(f"Unreadable: {each['reason']}")
    return Outcome({"metric": metric or None, "runs": found})


def _values(run: RunContents, metric: str) -> dict[str, Any]:
    """What programs get to know of a run."""
    from pytorch_accelerated.extras.report.reading import best_of

    best, state = best_of(run, metric), run.state
    kept = ("name", "value", "epoch", "update", "greater_is_better")
    return {
        "name": run.name,
        "path": run.source,
        "status": state.get("status"),
        "reason": state.get("detail", ""),
        "branch": run.branch or None,
        "best": best and {name: best[name] for name in kept},
        **{name: state.get(name) for name in ("epoch", "updates", "seconds", "updated", "error")},
    }


def _cells(values: dict[str, Any], folder: Path) -> list[str]:
    best, seconds, branch = values["best"], values["seconds"], values["branch"]
    value, epoch = (f"{best['value']:.6g}", best["epoch"]) if best else (None, None)
    time = None if seconds is None else format_duration(seconds)
    trunk = branch and f"{os.path.relpath(branch['trunk'], folder.resolve())} after update {branch['after_update']}"
    cells = (values["name"], values["status"], value, epoch, values["updates"], time, values["path"], trunk)
    return ["-" if cell is None else str(cell) for cell in cells]


def _compare(options: argparse.Namespace) -> Outcome:
    from pytorch_accelerated.extras.report.reading import COMPARISON_FILE, write_comparison

    values = _judge(options) if options.seeds else _part(options)
    if options.output or not options.seeds:
        values["output"] = options.output or Path(COMPARISON_FILE)
        left_out = write_comparison(options.runs, values["output"], options.metric)
        if not options.seeds:
            values["left_out"] = left_out
            for reason in left_out:
                print_line(f"Left out: {reason}")
        print_line(f"Comparison: {values['output']}")
    return Outcome(values)


def _part(options: argparse.Namespace) -> dict[str, Any]:
    """Say how far a branch and its trunk, or two branches, are apart since they have parted; nothing for others."""
    from pytorch_accelerated.extras.report.reading import read_run

    runs = [read_run(path) for path in options.runs] if len(options.runs) == 2 else []
    if not any(run.branch for run in runs):
        return {}
    series = [{"train_loss": _by_update(run.steps, "train_loss")} for run in runs]
    for values, run in zip(series, runs, strict=True):
        values |= {each["name"]: _by_update(each, "value") for each in run.metrics if each["role"].startswith("eval")}
    steps = [update for update in series[0]["train_loss"] if update in series[1]["train_loss"]]
    apart = [update for update in steps if len({each["train_loss"][update] for each in series}) > 1]
    since = max((update for update in steps if update < min(apart, default=0)), default=0)
    found, rows = [], []
    for name in series[0] if since else ():
        a, b = series[0][name], series[1].get(name, {})
        differences = [b[update] - a[update] for update in a if update in b and update > since]
        mean, margin = batch_means(differences)
        end = statistics.fmean(differences[-max(len(differences) // _BATCHES, 1) :] or [math.nan])
        found.append({"name": name, "values": len(differences), "difference": mean, "margin": margin, "end": end})
        shown = f"{mean:.4g}", "-" if margin is None else f"{margin:.2g}", f"{end:.4g}", str(len(differences))
        rows.append((name, *shown))
    if not found:
        return {}
    first, second = options.runs
    print_line(f"{second} minus {first}, since their losses parted after update {since}:")
    numbers = ("mean difference", "± (95 %)", "in the last tenth", "values")
    print_table(("metric", *numbers), rows, numbers=numbers)
    return {"parted_after": since, "differences": found}


def _by_update(columns: dict[str, Any], name: str) -> dict[int, float]:
    """The finite numbers in a column, by update."""
    pairs = zip(columns.get("update", ()), columns.get(name, ()), strict=True)
    return {update: float(value) for update, value in pairs if isinstance(value, (int, float)) and math.isfinite(value)}


def batch_means(differences: Sequence[float]) -> tuple[float, float | None]:
    """The mean of a series, and the half width of its 95 % confidence interval, by the method of batch means.

    Neighbouring updates have similar differences, so the usual standard error would be far too small. The series is cut
    into ten stretches, whose means are nearly independent, and the interval is that of the t-test on these: Schmeiser
    (1982), Batch size effects in the analysis of simulation output, Operations Research 30, who finds ten to thirty of
    them enough. If the length is no multiple of ten, the first values are left out.

    The interval is about these two runs in these updates: whether the mean difference is more than the noise of their
    batches. A trend widens it; a correlation over more than a tenth of the series makes it too narrow. It says nothing
    about other seeds, or rows that were not evaluated.

    Args:
        differences: in order, one for each update.

    Returns:
        The mean, NaN without values; and the half width, None for fewer than 20 values.
    """
    size = len(differences) // _BATCHES
    if size < 2:
        return statistics.fmean(differences) if differences else math.nan, None
    last = differences[-size * _BATCHES :]
    means = [statistics.fmean(last[start : start + size]) for start in range(0, len(last), size)]
    return statistics.fmean(means), _T_9 * statistics.stdev(means) / _BATCHES**0.5


def _judge(options: argparse.Namespace) -> dict[str, Any]:
    """Say which of two folders has the better runs, and return the verdict for programs."""
    from pytorch_accelerated.extras.report.reading import all_runs, best_of, main_metric, values_by_seed

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


class Verdict(NamedTuple):
    """What the pairs of runs say about the second configuration.

    Attributes:
        outcome: "better" or "worse" than the first one, or "not decided".
        means: of the values of the first configuration, and of the second.
        difference: the mean of second minus first.
        margin: the 95 % confidence interval of the difference is this much to either side; None if all differences
            are the same, which says nothing about their spread.
        p_value: how likely so large a difference is, in either direction, between configurations that are equally good.
        pairs_needed: how many pairs would decide a difference of this size, with a probability of 80 %; None if there
            is no difference, or 100,000 are too few.
    """

    outcome: str
    means: tuple[float, float]
    difference: float
    margin: float | None
    p_value: float
    pairs_needed: int | None


def judge(first: Sequence[float], second: Sequence[float], *, greater_is_better: bool) -> Verdict:
    """Test whether the values of two configurations differ, by the paired t-test, two-sided at 5 %.

    Where all differences are the same, as coarse metrics have it, their spread is unknown and t infinite. The test is
    then the test of signs: n equal differences have p = 2 / 2**n, so that it takes six pairs.

    Args:
        first: the values of one configuration, two at least.
        second: the other's, in the order of the same seeds.
        greater_is_better: whether greater values are better.

    Raises:
        MissingDependencyError: if scipy is not installed.
    """
    stats = require("scipy.stats", needed_by="`compare --seeds`")
    differences = [float(b - a) for a, b in zip(first, second, strict=True)]
    mean, spread = statistics.fmean(differences), statistics.stdev(differences)
    means = statistics.fmean(first), statistics.fmean(second)
    margin: float | None = None
    rounding = _SAME * max(map(abs, (*first, *second)))
    if spread <= rounding:
        is_zero = abs(mean) <= rounding
        p_value = 1.0 if is_zero else 2.0 ** (1 - len(differences))
        needed = None if is_zero else 6
    else:
        test = stats.ttest_rel(second, first)
        low, high = test.confidence_interval(1 - _SIGNIFICANCE)
        p_value, margin = float(test.pvalue), float(high - low) / 2
        needed = pairs_needed(abs(mean) / spread)
    outcome = "better" if (mean > 0) == greater_is_better else "worse"
    return Verdict(outcome if p_value <= _SIGNIFICANCE else "not decided", means, mean, margin, p_value, needed)


def pairs_needed(effect: float) -> int | None:
    """The fewest pairs with which the paired t-test finds a difference with a probability of 80 %.

    The power of the test is a tail of the noncentral t distribution with n - 1 degrees of freedom and the noncentrality
    effect * sqrt(n): Cohen, Statistical Power Analysis for the Behavioral Sciences, 2nd edition (1988), chapter 2.

    Args:
        effect: the mean of the differences, as a multiple of their standard deviation.

    Returns:
        None if 100,000 pairs are too few.
    """
    stats = require("scipy.stats", needed_by="`compare --seeds`")

    def power(pairs: int) -> float:
        limit = stats.t.isf(_SIGNIFICANCE / 2, pairs - 1)
        return float(stats.nct.sf(limit, pairs - 1, effect * pairs**0.5))

    # scipy has no value (NaN) far beyond the power that is asked for; `bisect` takes that as enough.
    found = bisect.bisect_left(range(_MOST_PAIRS + 1), _POWER, lo=2, key=power)
    return found if found <= _MOST_PAIRS else None


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
