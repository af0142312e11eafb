"""Metrics that decisions depend on: their new values, and which of all values is the best."""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from pytorch_accelerated.errors import ConfigurationError, UnknownMetricError
from pytorch_accelerated.ranks.ranks import Ranks
from pytorch_accelerated.record.history import RunHistory
from pytorch_accelerated.record.text import format_number
from pytorch_accelerated.record.values import MetricRecord, greater_is_better, is_scalar, role_and_quantity
from pytorch_accelerated.record.warning import warn_user

_OF_EVALUATION = ("eval_", "intermediate_", "ema_model_", "swa_model_")

PLATEAU = "The ReduceLROnPlateau", ('mode="min"', 'mode="max"')


class WatchedMetric(NamedTuple):
    """A metric of the run history on which a decision depends.

    All ranks use the values of rank 0, so that they decide alike. All ranks must call each method except `is_better`.

    Attributes:
        name: the metric's name in the run history.
        greater_is_better: whether larger values are better.
    """

    name: str
    greater_is_better: bool = False

    def check_has_evaluation(self, evaluation_data: Any) -> None:
        """Reject a metric of evaluations if there are no `evaluation_data`.

        Raises:
            ConfigurationError: if so.
        """
        if self.name.startswith(_OF_EVALUATION) and evaluation_data is None:
            raise ConfigurationError(
                f"The watched metric is {self.name!r}, but there is no evaluation set to measure it on. "
                "Pass `eval_dataset` to `train`, or watch a metric of training, such as 'train_loss_epoch'. An "
                "`EvaluateBesideCallback` comes before callbacks that stop the run or save the best model."
            )

    def check_direction(
        self, ranks: Ranks, who: str, settings: tuple[str, str] = ("greater_is_better=False", "greater_is_better=True")
    ) -> None:
        """Warn, on one process, if the words in the name say that the worst values would be taken for the best.

        Args:
            ranks: the processes.
            who: what watches the metric.
            settings: what says there that less is better, and that more is.
        """
        known = greater_is_better(role_and_quantity(self.name)[1])
        if known not in (None, self.greater_is_better):
            more, best, kept = ("more", "highest", "lowest") if known else ("less", "lowest", "highest")
            warn_user(
                ranks,
                f"{who} watches {self.name!r} with `{settings[self.greater_is_better]}`, so the {kept} value counts as "
                f"the best, and by its name {more} is better. Pass `{settings[known]}` if the {best} is the best, or "
                "record the metric under another name.",
            )

    def check_recorded(self, history: RunHistory, ranks: Ranks) -> None:
        """Reject a name that has no value at the end of an epoch.

        Names that start with ``intermediate_`` need no value before the first evaluation within an epoch, nor do those
        of an evaluation by another process.

        Raises:
            UnknownMetricError: names the metrics that exist.
        """
        names = ranks.from_first(list(history.get_metric_names()))
        may_come_later = self.name.startswith("intermediate_") and "intermediate_eval_loss" not in names
        may_come_later |= history.is_evaluated_beside and self.name.startswith(_OF_EVALUATION)
        if self.name not in names and not may_come_later:
            raise UnknownMetricError(
                f"The watched metric is {self.name!r}, but at the end of the epoch it has no value. Watch one of "
                f"{', '.join(map(repr, names))}, or record it with `run_history.update_metric` in each epoch."
            )

    def latest(self, history: RunHistory, ranks: Ranks) -> float | None:
        """The latest value; None before the first evaluation within an epoch, for a metric of these.

        Raises:
            UnknownMetricError: a ValueError, if there is no value; names the metrics that exist.
            ConfigurationError: if the value is not a number.
        """
        self.check_recorded(history, ranks)
        values = [history.get_latest_metric(self.name)] if self.name in history.get_metric_names() else []
        return next(iter(self._agreed(ranks, values)), None)

    def new_values(self, history: RunHistory, ranks: Ranks, reader: str) -> list[float]:
        """The values recorded since the last call for the same `reader`, so that each value is judged once.

        Args:
            history: the run history.
            ranks: the processes.
            reader: a name that no other reader uses; its position is saved with the run history.

        Raises:
            ConfigurationError: if a value is not a number.
        """
        new = [record.value for record in history.read_new_records(reader) if record.name == self.name]
        return self._agreed(ranks, new)

    def _agreed(self, ranks: Ranks, values: list[Any]) -> list[float]:
        """The values of rank 0 on every rank."""
        kinds = {type(value).__name__ for value in values if not is_scalar(value)}
        values, kinds = ranks.from_first(([float(value) for value in values if is_scalar(value)], kinds))
        if kinds:
            raise ConfigurationError(
                f"The watched metric is {self.name!r}, but its value is a {' or a '.join(sorted(kinds))}, which cannot "
                "be compared. Record a number under another name with `run_history.update_metric`, and watch that."
            )
        return values

    def is_better(self, new: float, best: float | None, threshold: float = 0.0) -> bool:
        """Whether `new` is better than `best` by at least `threshold`. NaN is never better, not even than None.

        Args:
            new: a value.
            best: the best value so far, or None.
            threshold: the smallest difference that counts.
        """
        sign = 1 if self.greater_is_better else -1
        gain = sign * (new - (-sign * math.inf if best is None else best))
        return gain > 0 and gain >= threshold


def is_finite_number(value: Any) -> bool:
    """Whether `value` is a number to which a metric can be compared."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool) and math.isfinite(value)


def watched_metrics(callbacks: Iterable[Any]) -> dict[str, bool]:
    """The metrics that callbacks watch, and whether greater is better."""
    watched = {}
    for callback in callbacks:
        name, greater = (getattr(callback, attribute, None) for attribute in ("watch_metric", "greater_is_better"))
        if isinstance(name, str) and isinstance(greater, bool):
            watched[name] = greater
    return watched


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
