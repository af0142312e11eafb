"""Plots of the metrics of one run, or of runs side by side, as figures that need no display."""

from __future__ import annotations

import functools
import io
import itertools
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from pytorch_accelerated.errors import ConfigurationError, UnknownMetricError
from pytorch_accelerated.facts.optional import require
from pytorch_accelerated.record.values import MetricRecord, greater_is_better, role_and_quantity, unknown_metric

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from pytorch_accelerated.record.history import RunHistory
    from pytorch_accelerated.record.step_records import StepRecord


_LINE_STYLES = ("-", ":", "-.")  # of roles other than training, which is dashed
_WITHIN_EPOCHS = "train_loss"


class _Run(NamedTuple):
    """What is plotted of a run: its name and history, the numbers of each metric, and its step records."""

    name: str
    history: RunHistory
    metrics: dict[str, list[MetricRecord]]
    steps: Sequence[StepRecord]


def _selected(histories: Mapping[str, RunHistory], metric_names: str | Iterable[str] | None) -> list[_Run]:
    numbers = {run: [each for each in history.records if each.is_scalar] for run, history in histories.items()}
    known = dict.fromkeys(record.name for records in numbers.values() for record in records)
    hidden = {name for history in histories.values() for name in history.names_not_shown}
    shown = [name for name in known if name not in hidden]
    wanted = [metric_names] if isinstance(metric_names, str) else list(shown if metric_names is None else metric_names)
    for name in wanted:
        if name not in known:
            raise unknown_metric(name, known, "number among its values")
    runs = [_Run(name, history, {}, history.step_records) for name, history in histories.items()]
    if metric_names is not None and "train_loss_epoch" not in wanted:
        runs = [run._replace(steps=()) for run in runs]
    for run in runs:
        for record in numbers[run.name]:
            if record.name in wanted:
                run.metrics.setdefault(record.name, []).append(record)
    return runs


def plot_runs(
    histories: Mapping[str, RunHistory],
    metric_names: str | Iterable[str] | None = None,
    path: str | os.PathLike[str] | None = None,
    *,
    smoothing: float = 0.6,
    log_scale: bool = False,
) -> Figure:
    """A figure of the metrics of runs, one panel for each quantity, losses first; see `RunHistory.plot`.

    The same quantity in training and evaluation shares a panel. Where it is known whether less or more is better, as of
    losses and accuracies, a ring marks the best value in evaluation, or in training without evaluation. The horizontal
    axis shows epochs if no metric has two values in one epoch, else updates. Each of two or more runs has a colour.
    """
    if not 0 <= smoothing < 1:
        raise ConfigurationError(f"`smoothing` is {smoothing!r}, but it must be from 0 (none) to below 1, such as 0.9.")
    runs = _selected(histories, metric_names)
    if not any(run.metrics or run.steps for run in runs):
        raise UnknownMetricError("Nothing has been recorded, so there is nothing to plot. Train first.")
    names = dict.fromkeys(name for run in runs for name in run.metrics)
    panels: dict[str, list[str]] = {}
    if any(run.steps for run in runs):
        panels["loss"] = [_WITHIN_EPOCHS]
    for name in names:
        panels.setdefault(role_and_quantity(name)[1], []).append(name)
    roles = list(dict.fromkeys(role_and_quantity(name)[0] for every in panels.values() for name in every))
    others = (role for role in roles if not role.startswith("train"))
    styles = {**dict.fromkeys(roles, "--"), **dict(zip(others, itertools.cycle(_LINE_STYLES), strict=False))}
    axis = "epoch" if all(_has_one_value_an_epoch(run.metrics) for run in runs) else "update"

    columns = math.ceil(math.sqrt(len(panels)))
    rows = math.ceil(len(panels) / columns)
    figure = new_figure(1.5 + 4.5 * columns, 3.5 * rows, needed_by="RunHistory.plot")
    losses_first = sorted(panels, key=lambda quantity: "loss" not in quantity)
    for position, quantity in enumerate(losses_first, start=1):
        axes = figure.add_subplot(rows, columns, position)
        for number, run in enumerate(runs):
            drawn = [name for name in panels[quantity] if name in run.metrics]
            evaluated = [name for name in drawn if not role_and_quantity(name)[0].startswith("train")]
            for name in panels[quantity]:
                role = roles.index(role_and_quantity(name)[0])
                # One colour for each role, or for each run, in all panels.
                colour, line = (f"C{role}", "-") if len(runs) == 1 else (f"C{number}", styles[roles[role]])
                label = name if len(runs) == 1 else f"{run.name}, {name}"
                if name == _WITHIN_EPOCHS and run.steps:
                    _draw_steps(axes, run, axis, smoothing, colour=colour, label=label)
                if name in drawn:
                    _draw(axes, run.metrics[name], axis, colour=colour, line=line, label=label)
                if name in (evaluated or drawn):
                    _mark_best(axes, run, name, axis, colour=colour)
        decorate(axes, quantity, axis)
        axes.locator_params(axis="x", integer=True, min_n_ticks=1)
        if log_scale and "loss" in quantity:
            axes.set_yscale("log")
        if panels[quantity] != [quantity] or len(runs) > 1:  # otherwise the title is enough
            axes.legend(frameon=False, fontsize="small" if len(runs) > 1 else None)
    if path is not None:
        figure.savefig(path, dpi=150)
    return figure


def smoothed(values: Iterable[float], weight: float) -> list[float]:
    """The exponentially weighted means of the values so far, in which the past has `weight`. NaN counts as missing.

    >>> smoothed([4.0, 2.0, 2.0], 0.5)
    [4.0, 2.6666666666666665, 2.2857142857142856]
    """
    mean = total = 0.0
    means = []
    for value in values:
        if math.isfinite(value):
            mean = weight * mean + (1 - weight) * value
            total = weight * total + (1 - weight)  # without it the means would begin near zero
        means.append(mean / total if total and math.isfinite(value) else math.nan)
    return means


def epochs_of_updates(steps: Sequence[StepRecord]) -> list[float]:
    """The place of each step record in epochs; there must be one: 1.5 in the middle of the second one.

    An epoch that is not finished counts as one that is as long as the longest of those before.
    """
    knots = [0, *{record.epoch: record.update for record in steps}.values()]  # the last update of each epoch
    knots[-1] = knots[-2] + max(np.diff(knots))
    epochs = [steps[0].epoch - 1, *dict.fromkeys(record.epoch for record in steps)]
    places: list[float] = np.interp([record.update for record in steps], knots, epochs).tolist()
    return places


def _has_one_value_an_epoch(metrics: Mapping[str, list[MetricRecord]]) -> bool:
    return all(len({record.epoch for record in records}) == len(records) for records in metrics.values())


def _draw(axes: Axes, records: list[MetricRecord], axis: str, *, colour: str, line: str, label: str) -> None:
    marker = "o" if len(records) <= 30 else ""  # more would overlap
    places, values = ([getattr(record, name) for record in records] for name in (axis, "value"))
    axes.plot(places, values, line, marker=marker, markersize=4, color=colour, linewidth=1.8, label=label)


def _draw_steps(axes: Axes, run: _Run, axis: str, smoothing: float, *, colour: str, label: str) -> None:
    """The training loss within epochs: smoothed, and as it is, faintly behind."""
    places: Sequence[float] = [record.update for record in run.steps]
    if axis == "epoch":
        places = epochs_of_updates(run.steps)
    values = [record.train_loss for record in run.steps]
    if smoothing:
        axes.plot(places, values, color=colour, alpha=0.25, linewidth=1)
    axes.plot(places, smoothed(values, smoothing), color=colour, alpha=0.7, linewidth=1.2, label=label)


def _mark_best(axes: Axes, run: _Run, name: str, axis: str, *, colour: str) -> None:
    """A ring around the best value of a metric, if it is known which one is."""
    is_greater_better = greater_is_better(role_and_quantity(name)[1])
    best = None if is_greater_better is None else run.history.best_record(name, is_greater_better)
    if best is not None and len(run.metrics[name]) > 1:
        spot, above = (getattr(best, axis), best.value), (0, -15 if is_greater_better else 9)
        axes.scatter(*spot, s=90, facecolors="none", edgecolors=colour, linewidths=1.8, zorder=3)
        axes.annotate(f"{best.value:.4g}", spot, above, textcoords="offset points", ha="center", color=colour)


def decorate(axes: Axes, title: str, x_label: str) -> None:
    """Give axes their texts and the look of all figures."""
    axes.set_title(title.replace("_", " "), loc="left")
    axes.set_xlabel(x_label)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


def new_figure(width: float, height: float, *, needed_by: str) -> Figure:
    """An empty figure, not registered with pyplot. As the last line of a notebook's cell it is shown, without a magic.

    Args:
        width: in inches.
        height: in inches.
        needed_by: the feature that needs it, for the error.

    Raises:
        MissingDependencyError: if matplotlib is not installed.
    """
    figure: Figure = require("matplotlib.figure", needed_by=needed_by).Figure((width, height), layout="constrained")
    figure._repr_png_ = functools.partial(_png_of, figure)  # type: ignore[attr-defined]
    return figure


def _png_of(figure: Figure) -> bytes:
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=110)
    return file.getvalue()
