"""The lines that sum up a training run at its end: its best value, its speed, and what was saved where."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from pytorch_accelerated.callbacks.watching import watched_metrics
from pytorch_accelerated.progress.formats import format_number
from pytorch_accelerated.tracking.best import best_record
from pytorch_accelerated.tracking.history import RunHistory

# How much waiting for data is worth a word.
_SHARE_WORTH_SHOWING = 0.05


def summary_lines(history: RunHistory, callbacks: Iterable[Any]) -> list[str]:
    """At most two lines; none for a run without epochs.

    `best_record` says which value is the best. Callbacks of this library say with a method `saved_places` what they
    save, and where.

    Args:
        history: of the run.
        callbacks: of the trainer.
    """
    callbacks = list(callbacks)
    best = best_record(history.records, watched_metrics(callbacks))
    facts = [] if best is None else [f"Best {best.name} {format_number(best.value)} (epoch {best.epoch})"]
    facts += _speed(history)
    places: Mapping[str, str] = {
        path: what
        for callback in callbacks
        if hasattr(callback, "saved_places")
        for what, path in callback.saved_places().items()
    }
    saved = ", ".join(f"{what} {path}" for path, what in places.items())
    return [line for line in (", ".join(facts), f"Saved: {saved}" if saved else "") if line]


def _speed(history: RunHistory) -> list[str]:
    measured = [record for record in history.step_records if record.samples_per_second > 0]
    seconds = sum(record.samples / record.samples_per_second for record in measured)
    if not seconds:
        return []
    waiting = sum(record.data_wait_share * record.samples / record.samples_per_second for record in measured) / seconds
    speed = f"{format_number(sum(record.samples for record in measured) / seconds)} samples/s"
    return [speed] if waiting < _SHARE_WORTH_SHOWING else [speed, f"waited for data {waiting:.0%} of the time"]
