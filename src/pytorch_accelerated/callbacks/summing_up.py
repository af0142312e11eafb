"""The lines that sum up a training run at its end: its best value, its speed, and what was saved where."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from pytorch_accelerated.callbacks.watching import watched_metrics
from pytorch_accelerated.progress.formats import format_count, format_number, format_rate
from pytorch_accelerated.progress.table import screen_columns
from pytorch_accelerated.tracking.best import best_record
from pytorch_accelerated.tracking.history import RunHistory

# How much waiting for data is worth a word.
_SHARE_WORTH_SHOWING = 0.05


def summary_lines(history: RunHistory, callbacks: Iterable[Any], *, num_warnings: int = 0) -> list[str]:
    """A line of results and one of saved files, or one for each file if they are too wide; none without epochs.

    `best_record` says which value is the best. Callbacks of this library say with a method `saved_places` what they
    save, and where.

    Args:
        history: of the run.
        callbacks: of the trainer.
        num_warnings: how many warnings were shown.
    """
    callbacks = list(callbacks)
    best = best_record(history.records, watched_metrics(callbacks))
    facts = [] if best is None else [f"Best {best.name} {format_number(best.value)} (epoch {best.epoch})"]
    facts += _speed(history)
    facts += [format_count(num_warnings, "warning")] if num_warnings else []
    places: Mapping[str, str] = {
        path: what
        for callback in callbacks
        if hasattr(callback, "saved_places")
        for what, path in callback.saved_places().items()
    }
    return [line for line in (", ".join(facts), *_places(places)) if line]


def _places(places: Mapping[str, str]) -> list[str]:
    if not places:
        return []
    line = "Saved: " + ", ".join(f"{what} {path}" for path, what in places.items())
    if len(line) <= screen_columns():
        return [line]
    width = max(map(len, places.values()))
    return ["Saved:", *(f"  {what:<{width}}  {path}" for path, what in places.items())]


def _speed(history: RunHistory) -> list[str]:
    measured = [record for record in history.step_records if record.samples_per_second > 0]
    seconds = sum(record.samples / record.samples_per_second for record in measured)
    if not seconds:
        return []
    waiting = sum(record.data_wait_share * record.samples / record.samples_per_second for record in measured) / seconds
    speed = f"{format_rate(sum(record.samples for record in measured) / seconds)} samples/s"
    return [speed] if waiting < _SHARE_WORTH_SHOWING else [speed, f"waited for data {waiting:.0%} of the time"]
