"""The picture: one panel for each of the main tables."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.measuring import Result
from benchmarks.ways import OURS

OURS_COLOUR, BY_HAND_COLOUR, OTHERS_COLOUR = "#c2410c", "#64748b", "#cbd5e1"
BY_HAND = ("raw loop", "accelerate by hand")


def plot(results: Sequence[Result], file: Path) -> None:
    """Draw bars of the compared values, best first, with labels."""
    columns = min(2, len(results))
    rows = -(-len(results) // columns)
    bars = max(len(result.rounds) for result in results)
    figure = Figure(figsize=(7.5 * columns, rows * (1.3 + 0.28 * bars)), layout="constrained")
    panels = list(figure.subplots(rows, columns, squeeze=False).flat)
    for axes, result in zip(panels, results, strict=False):
        _draw(axes, result)
    for axes in panels[len(results) :]:
        axes.set_visible(False)
    figure.savefig(file, dpi=110)


def _draw(axes: Axes, result: Result) -> None:
    ways = result.best_first()
    values = [result.compared(way) for way in ways]
    lowest, highest = min(0.0, *values), max(0.0, *values)
    axes.barh(ways, values, color=[_colour(way) for way in ways], height=0.72)
    for position, value in enumerate(values):
        shown = f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
        axes.annotate(shown, (max(value, 0), position), xytext=(4, 0), textcoords="offset points", va="center")
    axes.set_xlim(lowest, highest + 0.12 * (highest - lowest))
    axes.invert_yaxis()
    axes.set_xlabel(_label(result))
    axes.set_title(textwrap.fill(result.title, 48), fontsize=11, loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    for label in axes.get_yticklabels():
        label.set_fontweight("bold" if label.get_text() in OURS else "normal")


def _label(result: Result) -> str:
    if result.baseline is None:
        return result.unit
    if result.compared_as == "ratio":
        return f"ratio to the {result.baseline}"
    return f"{result.unit} above the {result.baseline}"


def _colour(way: str) -> str:
    if way in OURS:
        return OURS_COLOUR
    return BY_HAND_COLOUR if way.startswith(BY_HAND) else OTHERS_COLOUR
