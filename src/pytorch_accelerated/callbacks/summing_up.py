"""The lines that sum up a training run at its end: its best value, its speed, and what was saved where."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pytorch_accelerated.callbacks.watching import watched_metrics
from pytorch_accelerated.progress.formats import format_count, format_number, format_rate
from pytorch_accelerated.progress.table import screen_columns
from pytorch_accelerated.tracking.best import best_record
from pytorch_accelerated.tracking.history import RunHistory
from pytorch_accelerated.tracking.values import MetricRecord

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
    facts = best_facts(history.records, watched_metrics(callbacks))
    facts += _speed(history)
    facts += [format_count(num_warnings, "warning")] if num_warnings else []
    places: Mapping[str, str] = {
        path: what
        for callback in callbacks
        if hasattr(callback, "saved_places")
        for what, path in callback.saved_places().items()
    }
    return [line for line in (", ".join(facts), *saved_lines(places)) if line]


def best_facts(records: Iterable[MetricRecord], watched: Mapping[str, bool], *, names_step: bool = False) -> list[str]:
    """The best value and its epoch, or nothing; see `best_record`.

    Args:
        records, watched: as there.
        names_step: whether to name the step too: values are compared at any step, not only after epochs.
    """
    best = best_record(records, watched)
    if best is None:
        return []
    step = f", step {best.update}" if names_step else ""
    return [f"Best {best.name} {format_number(best.value)} (epoch {best.epoch}{step})"]


def with_mark(row: dict[str, str], records: Sequence[MetricRecord], watched: Mapping[str, bool]) -> dict[str, str]:
    """A row of a table with a "*" after the latest value of the metric that decides, if that is the best so far."""
    best = best_record(records, watched)
    if best is None or best.name not in row:
        return row
    latest = next(record for record in reversed(records) if record.name == best.name)
    return {**row, best.name: row[best.name] + ("*" if best is latest else " ")}


def saved_lines(places: Mapping[str, str]) -> list[str]:
    """What was saved, by path: one line, or one for each path if it would be too wide."""
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
