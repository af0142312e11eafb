"""The lines that sum up a training run at its end: its best value, its speed, and what was saved where."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from pytorch_accelerated.callbacks.watching import watched_metrics
from pytorch_accelerated.progress.formats import format_count, format_number, format_rate
from pytorch_accelerated.progress.screen import printable
from pytorch_accelerated.progress.table import screen_columns
from pytorch_accelerated.tracking.history import RunHistory
from pytorch_accelerated.tracking.step_records import samples_per_second
from pytorch_accelerated.tracking.values import MetricRecord, greater_is_better, role_and_quantity

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
    facts = best_facts(history, watched_metrics(callbacks))
    facts += _speed(history)
    facts += [format_count(num_warnings, "warning")] if num_warnings else []
    places: Mapping[str, str] = {
        path: what
        for callback in callbacks
        if hasattr(callback, "saved_places")
        for what, path in callback.saved_places().items()
    }
    return [printable(line) for line in (", ".join(facts), *saved_lines(places)) if line]


def best_facts(history: RunHistory, watched: Mapping[str, bool], *, names_step: bool = False) -> list[str]:
    """The best value and its epoch, or nothing; see `best_record`.

    Args:
        history, watched: as there.
        names_step: whether to name the step too: values are compared at any step, not only after epochs.
    """
    best = best_record(history, watched)
    if best is None:
        return []
    step = f", step {best.update}" if names_step else ""
    return [f"Best {best.name} {format_number(best.value)} (epoch {best.epoch}{step})"]


def with_mark(row: dict[str, str], history: RunHistory, watched: Mapping[str, bool]) -> dict[str, str]:
    """A row of a table with a "*" after the latest value of the metric that decides, if that is the best so far."""
    best = best_record(history, watched)
    if best is None or best.name not in row:
        return row
    return {**row, best.name: row[best.name] + ("*" if best is history.latest_record(best.name) else " ")}


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
    speed = samples_per_second(history.step_records)
    if speed is None:
        return []
    words = speed_in_words(speed)
    seconds = sum(timing.seconds for timing in history.timings)
    waited = sum(timing.data_wait_seconds for timing in history.timings)
    is_much = waited > _SHARE_WORTH_SHOWING * seconds
    return [words, f"waited for data {waited / seconds:.0%} of the time"] if is_much else [words]


def speed_in_words(speed: float) -> str:
    """A speed over a whole run, in samples per second."""
    return f"{format_rate(speed)} samples/s of wall time"


def best_record(history: RunHistory, watched: Mapping[str, bool]) -> MetricRecord | None:
    """The first of the best values so far of the metric that decides which epoch is the best; None if none does.

    That is the first watched metric with finite values, else the loss of evaluations, else another metric of
    evaluations whose name says what is better.

    Args:
        history: of the run.
        watched: the metrics that callbacks watch, and whether greater is better.
    """
    evaluated = {}
    for name in history.get_metric_names():
        role, quantity = role_and_quantity(name)
        greater = greater_is_better(quantity)
        if greater is not None and "train" not in role:
            evaluated[name] = greater
    losses_first = sorted(evaluated, key=lambda name: (name != "eval_loss_epoch", role_and_quantity(name)[1] != "loss"))
    deciding = {**dict.fromkeys(watched), **dict.fromkeys(losses_first)}
    found = (history.best_record(name, watched.get(name, evaluated.get(name, False))) for name in deciding)
    return next((record for record in found if record is not None), None)
