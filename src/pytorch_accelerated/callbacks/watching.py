"""A metric that callbacks watch: its new values, and which of them are better."""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Iterable
from typing import Any

from pytorch_accelerated.callbacks.expected import ExpectedMetrics, near_names
from pytorch_accelerated.callbacks.warning import warn_user
from pytorch_accelerated.errors import ConfigurationError, UnknownMetricError
from pytorch_accelerated.processes.ranks import Ranks
from pytorch_accelerated.tracking.history import RunHistory
from pytorch_accelerated.tracking.names import greater_is_better, role_and_quantity
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

    def check_before_run(self, expected: ExpectedMetrics, ranks: Ranks) -> None:
        """Reject a name that this training run will not record, as far as is known before the run.

        If code of the user may record it, a name that is very like a known one is only warned about.

        Raises:
            ConfigurationError: for a metric of evaluations, if there is no evaluation set.
            UnknownMetricError: for a metric that nothing will record; names those that something will.
        """
        if self.name == "evaluation_loss":
            raise UnknownMetricError(
                "The watched metric is 'evaluation_loss', which only `Trainer.evaluate` records, but this is a "
                "training run. Watch 'eval_loss_epoch'."
            )
        if self.name.startswith(_OF_EVALUATION) and not expected.has_evaluation:
            raise ConfigurationError(
                f"The watched metric is {self.name!r}, but there is no evaluation set to measure it on. "
                "Pass `eval_dataset` to `train`, or watch a metric of training, such as 'train_loss_epoch'."
            )

        if self.name in expected.names:
            return
        if not expected.may_have(self.name):
            remedy = "record it, for example with a `MetricsCallback`"
            if self.name.startswith("intermediate_"):
                remedy = "evaluate within epochs, with a `StepBasedEvaluationCallback`"
            raise UnknownMetricError(
                f"The watched metric is {self.name!r}, but nothing in this run will record it."
                f"{expected.near(self.name)} The run will record {', '.join(map(repr, expected.names))}. Watch one of "
                f"these, or {remedy}."
            )
        if expected.is_probably_a_slip(self.name):
            near = expected.near(self.name)
            warn_user(ranks, f"The watched metric is {self.name!r}, which may be a slip of the pen.{near}")

    def warn_of_direction(self, ranks: Ranks) -> None:
        """Warn if the metric's name says that more is better, but the smallest value would be taken as the best."""
        if not self.greater_is_better and greater_is_better(role_and_quantity(self.name)[1]):
            warn_user(
                ranks,
                f"The watched metric is {self.name!r}, of which more is usually better, but `greater_is_better` is "
                "False: the smallest value counts as the best. Pass `greater_is_better=True`.",
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
                f"The watched metric is {self.name!r}, but at the end of the epoch it has no value."
                f"{near_names(self.name, names)} There is: {', '.join(map(repr, names))}. Watch one of these, or "
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
        values, kinds = ranks.from_first(([value for value in values if is_scalar(value)], kinds))
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
