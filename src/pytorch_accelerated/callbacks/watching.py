"""A metric that callbacks watch: its new values, and which of them are better."""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Iterable
from typing import Any

from pytorch_accelerated.errors import ConfigurationError, UnknownMetricError
from pytorch_accelerated.processes.ranks import Ranks
from pytorch_accelerated.tracking.history import RunHistory
from pytorch_accelerated.tracking.values import is_scalar

_OF_EVALUATION = ("eval_", "intermediate_", "ema_model_")

KINDS_OF_BEST = {"best_metric": (float, int, type(None)), "best_metric_epoch": (int, type(None))}
"""The types of the attributes of a callback that watches a metric; see `require_kinds`."""


@dataclasses.dataclass(frozen=True)
class WatchedMetric:
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
                "Pass `eval_dataset` to `train`, or watch a metric of training, such as 'train_loss_epoch'."
            )

    def check_recorded(self, history: RunHistory, ranks: Ranks) -> None:
        """Reject a name that has no value at the end of an epoch.

        Names that start with "intermediate_" need no value before the first evaluation within an epoch.

        Raises:
            UnknownMetricError: names the metrics that exist.
        """
        names = ranks.from_first(list(history.get_metric_names()))
        may_come_later = self.name.startswith("intermediate_") and "intermediate_eval_loss" not in names
        if self.name not in names and not may_come_later:
            raise UnknownMetricError(
                f"The watched metric is {self.name!r}, but at the end of the epoch it has no value. "
                f"There is: {', '.join(map(repr, names))}. Watch one of these, or "
                f"record {self.name!r} with `run_history.update_metric` before the end of each epoch."
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
                "be compared with others. Record one number under a name of its own with `run_history.update_metric`, "
                "and watch that."
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
