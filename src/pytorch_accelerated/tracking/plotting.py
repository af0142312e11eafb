"""Plots of the metrics of a run."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from pytorch_accelerated.errors import UnknownMetricError
from pytorch_accelerated.optional import require

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from pytorch_accelerated.tracking.values import MetricRecord

# The prefix of a name says what was measured on: train_loss_epoch and ema_model_eval_loss_epoch are both losses.
_ROLES = re.compile("(?:(?:ema_model|intermediate|training|train|evaluation|eval|validation|valid|val|test)[_/])*")


def plot_records(records: Sequence[MetricRecord], path: str | os.PathLike[str] | None = None) -> Figure:
    """A figure of the metrics in `records`, one panel for each quantity, losses first.

    The same quantity in training and evaluation shares a panel. The horizontal axis shows epochs if no metric has two
    values in one epoch, else updates if no metric has two values at one update, else the number of the value.

    Args:
        records: in the order of recording.
        path: also save the picture there; the suffix determines the format.

    Returns:
        The figure, without a display and not registered with pyplot.

    Raises:
        UnknownMetricError: if there are no records.
        MissingDependencyError: if matplotlib is not installed.
    """
    if not records:
        raise UnknownMetricError("Nothing has been recorded, so there is nothing to plot. Train first.")
    figure_module = require("matplotlib.figure", extra="plot", needed_by="RunHistory.plot")
    metrics: dict[str, list[MetricRecord]] = {}
    for record in records:
        metrics.setdefault(record.name, []).append(record)
    panels: dict[str, list[str]] = {}
    for name in metrics:
        panels.setdefault(role_and_quantity(name)[1], []).append(name)
    roles = list(dict.fromkeys(role_and_quantity(name)[0] for name in metrics))
    axis = next((axis for axis in ("epoch", "update") if _tells_values_apart(axis, metrics)), "value")

    columns = math.ceil(math.sqrt(len(panels)))
    rows = math.ceil(len(panels) / columns)
    figure: Figure = figure_module.Figure(figsize=(1.5 + 4.5 * columns, 3.5 * rows), layout="constrained")
    losses_first = sorted(panels, key=lambda quantity: "loss" not in quantity)
    for position, quantity in enumerate(losses_first, start=1):
        axes = figure.add_subplot(rows, columns, position)
        for name in panels[quantity]:
            # One colour for each role, in all panels.
            _draw(axes, metrics[name], axis, colour=f"C{roles.index(role_and_quantity(name)[0])}")
        _decorate(axes, quantity, axis)
        if panels[quantity] != [quantity]:  # otherwise the title is enough
            axes.legend(frameon=False)
    if path is not None:
        figure.savefig(path, dpi=150)
    return figure


def role_and_quantity(name: str) -> tuple[str, str]:
    """The role and the quantity of a metric: ("eval_", "loss") for "eval_loss_epoch"."""
    end = _ROLES.match(name).end()  # type: ignore[union-attr]  # it matches the empty string too
    return name[:end], name[end:].removesuffix("_epoch") or name


def _tells_values_apart(axis: str, metrics: dict[str, list[MetricRecord]]) -> bool:
    return all(len({getattr(record, axis) for record in records}) == len(records) for records in metrics.values())


def _draw(axes: Axes, records: list[MetricRecord], axis: str, *, colour: str) -> None:
    positions = range(1, len(records) + 1) if axis == "value" else [getattr(record, axis) for record in records]
    marker = "o" if len(records) <= 30 else ""  # more would overlap
    values = [record.value for record in records]
    axes.plot(positions, values, color=colour, marker=marker, markersize=4, linewidth=1.8, label=records[0].name)


def _decorate(axes: Axes, quantity: str, axis: str) -> None:
    axes.set_title(quantity.replace("_", " "), loc="left")
    axes.set_xlabel(axis)
    axes.locator_params(axis="x", integer=True, min_n_ticks=1)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
