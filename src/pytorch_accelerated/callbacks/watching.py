"""Metrics that callbacks watch: their new values, and which of all values is the best."""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from pytorch_accelerated.callbacks.base import TrainerCallback
from pytorch_accelerated.errors import ConfigurationError, UnknownMetricError
from pytorch_accelerated.ranks.ranks import Ranks
from pytorch_accelerated.record.history import RunHistory
from pytorch_accelerated.record.text import format_number
from pytorch_accelerated.record.values import MetricRecord, greater_is_better, is_scalar, role_and_quantity
from pytorch_accelerated.record.warning import warn_user
from pytorch_accelerated.states.matching import require_kinds

if TYPE_CHECKING:
    from pytorch_accelerated.callbacks.base import Trainer

_OF_EVALUATION = ("eval_", "intermediate_", "ema_model_")

KINDS_OF_BEST = {"best_metric": (float, int, type(None)), "best_metric_epoch": (int, type(None))}


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

    def check_direction(self, ranks: Ranks, who: str) -> None:
        """Warn, on one process, if the words in the name say that the worst values would be taken for the best.

        Args:
            ranks: the processes.
            who: what watches the metric.
        """
        known = greater_is_better(role_and_quantity(self.name)[1])
        if known not in (None, self.greater_is_better):
            more, best, kept = ("more", "highest", "lowest") if known else ("less", "lowest", "highest")
            warn_user(
                ranks,
                f"{who} watches {self.name!r} with `greater_is_better={self.greater_is_better}`, so the {kept} value "
                f"counts as the best, and by its name {more} is better. Pass `greater_is_better={known}` if the {best} "
                "is the best, or record the metric under another name.",
            )

    def check_recorded(self, history: RunHistory, ranks: Ranks) -> None:
        """Reject a name that has no value at the end of an epoch.

        Names that start with "intermediate_" need no value before the first evaluation within an epoch, nor do those of
        an evaluation beside the run.

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


class MetricJudge(TrainerCallback):
    """Judges each new value of `watch_metric` once: at the end of the epoch, or after an evaluation within an epoch.

    Values of `Trainer.evaluate` are not judged. A subclass says what follows: `_judge` and the methods after it. Its
    state is the attributes in `_kinds`, with the types that each may have.
    """

    takes_part_in_preflight = False
    watch_metric = "eval_loss_epoch"
    _kinds: Mapping[str, tuple[type, ...]] = {}

    def on_training_run_start(self, trainer: Trainer, **kwargs: Any) -> None:
        """Start anew, unless the run is resumed.

        Raises:
            ConfigurationError: for a metric of evaluations, if there is no evaluation set.
        """
        if not trainer.run_history.is_evaluated_beside:
            self._watched.check_has_evaluation(trainer.eval_dataset)
        if hasattr(self, "greater_is_better"):
            self._watched.check_direction(trainer.run_context.ranks, type(self).__name__)
        if trainer.run_state.updates > 0:
            self._continue()
        else:
            self._new_values(trainer)  # those of earlier runs belong to other weights
            self._start_anew()

    def on_eval_epoch_end(self, trainer: Trainer, *, is_intermediate: bool = False, **kwargs: Any) -> None:
        """Judge an evaluation within an epoch."""
        if is_intermediate:
            self._judge(trainer, self._new_values(trainer))

    def on_training_run_epoch_end(self, trainer: Trainer, **kwargs: Any) -> None:
        """Judge the epoch, after every callback has recorded its metrics.

        Raises:
            UnknownMetricError: if the metric has no value yet.
        """
        self._watched.check_recorded(trainer.run_history, trainer.run_context.ranks)
        self._judge(trainer, self._new_values(trainer))

    def judge_state(self, trainer: Trainer, state: Any) -> None:
        """Judge new values, which belong to the training state in the folder `state` of this run; it may be gone.

        Must be called by all ranks.
        """
        self._judge(trainer, self._new_values(trainer), state)

    def state_dict(self) -> dict[str, Any]:
        """What is known of the values so far."""
        return {name: getattr(self, name) for name in self._kinds}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what the run that is being resumed knew."""
        require_kinds(state, self._kinds, of=type(self).__name__)
        vars(self).update({name: state[name] for name in self._kinds})

    @property
    def _watched(self) -> WatchedMetric:
        return WatchedMetric(self.watch_metric, getattr(self, "greater_is_better", False))

    def _new_values(self, trainer: Trainer) -> list[float]:
        return self._watched.new_values(trainer.run_history, trainer.run_context.ranks, self.state_key)

    def _judge(self, trainer: Trainer, values: list[float], state: Any = None) -> None:
        """Act on new values, of which the last belongs to `state`, or without one to the weights that the model has
        now.
        """

    def _start_anew(self) -> None:
        """Forget what is known of earlier runs."""

    def _continue(self) -> None:
        """Act on what a resumed run knows already."""


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
