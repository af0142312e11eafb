"""A small picture of the losses of a run, as SVG without scripts, styles or fonts of its own."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Sequence

from pytorch_accelerated.progress.formats import format_number
from pytorch_accelerated.tracking.step_records import StepRecord
from pytorch_accelerated.tracking.values import MetricRecord

_WIDTH, _HEIGHT = 340, 170
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 10, 22, 20
# More points than this are not told apart at this size.
_MAX_POINTS = 160
_TRAINING_COLOUR = "#4c8bf5"
# They can be read on light and on dark pages.
_COLOURS = ("#e8710a", "#12a37f", "#c2569e", "#9a7b1c")
_COLUMNS_OF_A_LETTER = 6.2


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
    width, height = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM

    def place(point: tuple[float, float]) -> tuple[str, str]:
        x, y = point
        down = (high + margin - y) / (high - low + 2 * margin)
        return f"{_LEFT + width * x / max(last, 1):.1f}", f"{_TOP + height * down:.1f}"

    parts = []
    for value in dict.fromkeys((high, (low + high) / 2, low)):
        _, y = place((0, value))
        parts.append(
            f"<line x1='{_LEFT}' x2='{_WIDTH - _RIGHT}' y1='{y}' y2='{y}' stroke='currentColor' stroke-opacity='.15'/>"
            f"<text x='{_LEFT - 6}' y='{y}' dy='.35em' text-anchor='end'>{format_number(value)}</text>"
        )
    parts.append(f"<text x='{_LEFT}' y='{_HEIGHT - 4}'>0</text>")
    end = f"{last:.0f} updates"
    parts.append(f"<text x='{_WIDTH - _RIGHT}' y='{_HEIGHT - 4}' text-anchor='end'>{end}</text>")
    colours = iter(_COLOURS)
    legend = float(_LEFT)
    for name, each in shown.items():
        is_training = name.startswith("train_loss")
        colour = _TRAINING_COLOUR if is_training else next(colours, _TRAINING_COLOUR)
        places = [place(point) for point in each]
        line = " ".join(",".join(point) for point in places)
        stroke = f"fill='none' stroke='{colour}' stroke-width='1.6' stroke-linejoin='round'"
        parts.append(f"<polyline points='{line}' {stroke}/>")
        if not is_training and len(places) <= _MAX_POINTS // 4:
            parts += [f"<circle cx='{x}' cy='{y}' r='2.6' fill='{colour}'/>" for x, y in places]
        parts.append(f"<text x='{legend:.0f}' y='12' style='fill:{colour}'>{html.escape(name)}</text>")
        legend += _COLUMNS_OF_A_LETTER * (len(name) + 2)
    return (
        f"<svg viewBox='0 0 {_WIDTH} {_HEIGHT}' width='{_WIDTH}' height='{_HEIGHT}' role='img' "
        "aria-label='losses by update' style='max-width:100%' font-family='sans-serif' font-size='11' "
        f"fill='currentColor'>{''.join(parts)}</svg>"
    )


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
