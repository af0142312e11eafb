"""A small picture of the losses of a run, as SVG without scripts, styles or fonts of its own."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Sequence

from pytorch_accelerated.progress.formats import format_number
from pytorch_accelerated.tracking.step_records import StepRecord
from pytorch_accelerated.tracking.values import MetricRecord

_WIDTH, _HEIGHT = 340, 170
_RIGHT, _BOTTOM = 10, 20
_LINE = 16  # the height of a line of the legend
# More points than this are not told apart at this size.
_MAX_POINTS = 160
_TRAINING_COLOUR = "#4c8bf5"
# They can be read on light and on dark pages.
_COLOURS = ("#e8710a", "#12a37f", "#c2569e", "#9a7b1c")
_WIDTH_OF_A_LETTER = 6.2


def curves_of(steps: Sequence[StepRecord], losses: Iterable[MetricRecord]) -> str:
    """The training loss within the epochs, and losses measured now and then. Empty without two points to connect.

    Args:
        steps: the step records of the run.
        losses: the records of the metrics that are losses, in the order of recording.
    """
    curves: dict[str, list[tuple[float, float]]] = {}
    if steps:
        curves["train_loss"] = _fewer([(step.update, step.train_loss) for step in steps])
    for record in losses:
        if not (steps and record.name == "train_loss_epoch"):
            curves.setdefault(record.name, []).append((record.update, record.value))
    curves = {name: [point for point in points if math.isfinite(point[1])] for name, points in curves.items()}
    shown = {name: _fewer(points) for name, points in curves.items() if points}
    shown = dict(list(shown.items())[: 1 + len(_COLOURS)])
    if max(map(len, shown.values()), default=0) < 2:
        return ""
    points = [point for each in shown.values() for point in each]
    last = max(x for x, _ in points)
    low, high = min(y for _, y in points), max(y for _, y in points)
    margin = (high - low) * 0.05 or abs(high) * 0.1 or 1.0
    marks = {value: format_number(value) for value in (high, (low + high) / 2, low)}
    left = 8 + _WIDTH_OF_A_LETTER * max(map(len, marks.values()))
    width, height = _WIDTH - left - _RIGHT, _HEIGHT - _LINE - _BOTTOM
    below = _places_of_names(list(shown), width)
    top = below[-1][1] + _LINE

    def place(point: tuple[float, float]) -> tuple[str, str]:
        x, y = point
        down = (high + margin - y) / (high - low + 2 * margin)
        return f"{left + width * x / max(last, 1):.1f}", f"{top + height * down:.1f}"

    parts = []
    for value, mark in marks.items():
        x, y = place((0, value))
        parts.append(
            f"<line x1='{x}' x2='{_WIDTH - _RIGHT}' y1='{y}' y2='{y}' stroke='currentColor' stroke-opacity='.15'/>"
            f"<text x='{left - 6:.1f}' y='{y}' dy='.35em' text-anchor='end'>{mark}</text>"
        )
    total_height = top + height + _BOTTOM
    parts.append(f"<text x='{left:.1f}' y='{total_height - 4}'>0</text>")
    end = f"{last:.0f} updates"
    parts.append(f"<text x='{_WIDTH - _RIGHT}' y='{total_height - 4}' text-anchor='end'>{end}</text>")
    colours = iter(_COLOURS)
    for (name, each), (right, down) in zip(shown.items(), below, strict=True):
        is_training = name.startswith("train_loss")
        colour = _TRAINING_COLOUR if is_training else next(colours, _TRAINING_COLOUR)
        places = [place(point) for point in each]
        line = " ".join(",".join(point) for point in places)
        stroke = f"fill='none' stroke='{colour}' stroke-width='1.6' stroke-linejoin='round'"
        parts.append(f"<polyline points='{line}' {stroke}/>")
        if not is_training and len(places) <= _MAX_POINTS // 4:
            parts += [f"<circle cx='{x}' cy='{y}' r='2.6' fill='{colour}'/>" for x, y in places]
        parts.append(f"<text x='{left + right:.0f}' y='{down - 4}' style='fill:{colour}'>{html.escape(name)}</text>")
    return (
        f"<svg viewBox='0 0 {_WIDTH} {total_height}' width='{_WIDTH}' height='{total_height}' role='img' "
        "aria-label='losses by update' style='max-width:100%' font-family='sans-serif' font-size='11' "
        f"fill='currentColor'>{''.join(parts)}</svg>"
    )


def _places_of_names(names: Sequence[str], width: float) -> list[tuple[float, int]]:
    """How far to the right, and how far down, each name of the legend is, in as many lines as they need.

    >>> _places_of_names(["loss", "a_long_name"], 100)
    [(0.0, 16), (0.0, 32)]
    """
    right, down = 0.0, _LINE
    places = []
    for name in names:
        if right and right + _WIDTH_OF_A_LETTER * len(name) > width:
            right, down = 0.0, down + _LINE
        places.append((right, down))
        right += _WIDTH_OF_A_LETTER * (len(name) + 2)
    return places


def _fewer(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """At most `_MAX_POINTS`: each is the mean of as many as needed, at the place of the last one."""
    size = -(-len(points) // _MAX_POINTS)
    if size <= 1:
        return points
    groups = [points[start : start + size] for start in range(0, len(points), size)]
    means = []
    for group in groups:
        finite = [y for _, y in group if math.isfinite(y)]
        means.append((group[-1][0], sum(finite) / len(finite) if finite else math.nan))
    return means
