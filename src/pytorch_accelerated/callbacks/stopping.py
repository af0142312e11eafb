"""Callbacks that judge each value of a metric once, and those that end a run early: by a metric, or a loss."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from pytorch_accelerated.errors import (
    ConfigurationError,
    NonFiniteLossError,
    StopTrainingError,
    UnknownMetricError,
    require_kinds,
)
from pytorch_accelerated.facts.names import is_users_class
from pytorch_accelerated.facts.settings import check_positive_count
from pytorch_accelerated.loop.callback import TrainerCallback
from pytorch_accelerated.ranks.numerics import described_parameters
from pytorch_accelerated.record.text import format_count
from pytorch_accelerated.record.watching import WatchedMetric, is_finite_number

if TYPE_CHECKING:
    from pytorch_accelerated.loop.callback import Trainer


KINDS_OF_BEST = {"best_metric": (float, int, type(None)), "best_metric_epoch": (int, type(None))}


class MetricJudge(TrainerCallback):
    """Judges each new value of `watch_metric` once: at the end of the epoch, or after an evaluation within an epoch.

    Values of `Trainer.evaluate` are not judged. A subclass says what follows: `_judge` and the methods after it. Its
    state is the attributes in `_kinds`, with the types that each may have.
    """

    takes_part_in_preflight = False
    recorded_names: Iterable[str] | None = ()
    watch_metric = "eval_loss_epoch"
    _kinds: Mapping[str, tuple[type, ...]] = {}

    def on_training_run_start(self, trainer: Trainer, **kwargs: Any) -> None:
        """Forget earlier runs, unless this one is resumed.

        Raises:
            ConfigurationError: for a metric of evaluations, if there is no evaluation set.
            UnknownMetricError: if nothing in the run records the metric.
        """
        if not trainer.run_history.is_evaluated_beside:
            self._watched.check_has_evaluation(trainer.eval_dataset)
            refuse_unrecorded(trainer, self.watch_metric)
        if hasattr(self, "greater_is_better"):
            self._watched.check_direction(trainer.run_context.parts.ranks, type(self).__name__)
        if trainer.run_state.updates > 0:
            self._continue()
        else:
            self._new_values(trainer)  # values of earlier runs belong to other weights
            self._start_over()

    def on_eval_epoch_end(self, trainer: Trainer, *, is_intermediate: bool = False, **kwargs: Any) -> None:
        """Judge an evaluation within an epoch."""
        if is_intermediate:
            self._judge(trainer, self._new_values(trainer))

    def on_training_run_epoch_end(self, trainer: Trainer, **kwargs: Any) -> None:
        """Judge the epoch, after every callback has recorded its metrics.

        Raises:
            UnknownMetricError: if the metric has no value yet.
        """
        self._watched.check_recorded(trainer.run_history, trainer.run_context.parts.ranks)
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
        return self._watched.new_values(trainer.run_history, trainer.run_context.parts.ranks, self.state_key)

    def _judge(self, trainer: Trainer, values: list[float], state: Any = None) -> None:
        """Act on new values. The last belongs to `state`, or without one to the weights that the model has now."""

    def _start_over(self) -> None:
        """Forget what is known of earlier runs."""

    def _continue(self) -> None:
        """Act on what a resumed run knows already."""


def refuse_unrecorded(trainer: Trainer, name: str) -> None:
    """Reject a metric that nothing in a run records, if all that records is known: nothing in it is a user's class.

    Raises:
        UnknownMetricError: names the metrics that are recorded.
    """
    callbacks, history = trainer.callback_handler.callbacks, trainer.run_history
    recorded = [each.recorded_names for each in callbacks if hasattr(each, "recorded_names")]
    is_known = (
        len(recorded) == len(callbacks) and None not in recorded and not trainer.run_context.parts.loaders.eval_sets
    )
    if not is_known or any(is_users_class(type(each)) for each in (trainer, history, *callbacks)):
        return
    names = ["train_loss_epoch", "eval_loss_epoch", *(each for names in recorded for each in names or ())]
    at_times = ["intermediate_eval_loss", "gradient_norm", "skipped_updates", *history.get_metric_names()]
    if name not in names + at_times:
        near = difflib.get_close_matches(name, names, n=1)
        hint = f"Watch {near[0]!r}" if near else f"Watch one of {', '.join(map(repr, names))}"
        raise UnknownMetricError(f"The watched metric is {name!r}, which nothing in this run records. {hint}.")


class TerminateOnNaNCallback(TrainerCallback):
    """Ends a run with an error, on every rank, when the loss of a batch is NaN or infinite.

    The loop reads losses from the device in bulk, so some updates may have followed the bad batch. The model is not
    saved after that.

    >>> callbacks = [TerminateOnNaNCallback]  # one of the default callbacks
    """

    recorded_names = ()

    def on_non_finite_loss(self, trainer: Trainer, metric_name: str, epoch: int, step: int, **kwargs: Any) -> None:
        """End the run.

        Raises:
            NonFiniteLossError: names the epoch, the first such batch and the metric.
        """
        place, consequence = f"In epoch {epoch}", f"{metric_name!r} and every later update"
        remedy = "; else try a smaller learning rate, a warmup, `gradient_clip_norm`, or bf16 instead of fp16"
        hint = " `nonfinite_policy='skip'` says which module's output is the first that is not finite."
        if not metric_name.startswith("train"):
            is_in_training = trainer.run_history.updates_done > 0
            place = f"In the evaluation of epoch {epoch}" if is_in_training else "In the evaluation"
            consequence, remedy, hint = repr(metric_name), "", ""
        raise NonFiniteLossError(
            f"{place}, the loss of batch {step} (counted from 0) is NaN or infinite, so {consequence} would be "
            "meaningless. Look for bad values in that batch and for a division, root or logarithm of 0 in the loss"
            f"{remedy}. {described_parameters(trainer.get_model())}{hint}"
        )


@dataclasses.dataclass(eq=False, repr=False)
class EarlyStoppingCallback(MetricJudge):
    """Ends the run at the first value of a metric that is not better than the best by 0.01: both numbers are arguments.

    As in pytorch-accelerated 0.1.61, the defaults are a patience of 1 and an absolute threshold of 0.01, which is large
    for a loss of 0.05: most runs want ``EarlyStoppingCallback(5, early_stopping_threshold=0)`` or so.

    Every value is judged once: values of an epoch and its evaluation at the end of the epoch, values of an evaluation
    within an epoch right after that evaluation. Values of `Trainer.evaluate` are not judged.

    >>> accuracy = {"watch_metric": "eval_accuracy", "greater_is_better": True}
    >>> callbacks = [..., EarlyStoppingCallback(early_stopping_patience=3, **accuracy)]

    Args:
        early_stopping_patience: the number of values in a row without an improvement after which the run ends.
        early_stopping_threshold: the smallest change that counts as an improvement; absolute, in units of the metric.
        watch_metric: the metric's name in the run history.
        greater_is_better: whether larger values are better.
        reset_on_train: whether each call of `train` starts without the `best_metric` of an earlier call.

    Attributes:
        best_metric: the last value that counted as an improvement, to which the next value is compared, or None. Later
            values may be better by less than the threshold.
        best_metric_epoch: the epoch in which `best_metric` was recorded, or None.
        evaluations_without_improvement: the current number of values in a row without an improvement.

    Raises:
        ConfigurationError: if the patience is less than 1, or the threshold is negative or not a number.
    """

    early_stopping_patience: int = 1
    early_stopping_threshold: float = 0.01
    watch_metric: str = "eval_loss_epoch"
    greater_is_better: bool = False
    reset_on_train: bool = True

    best_metric: float | None = dataclasses.field(default=None, init=False)
    best_metric_epoch: int | None = dataclasses.field(default=None, init=False)
    evaluations_without_improvement: int = dataclasses.field(default=0, init=False)

    _told_apart_by = "watch_metric"
    _kinds = {**KINDS_OF_BEST, "evaluations_without_improvement": (int,)}

    def __post_init__(self) -> None:
        check_positive_count("early_stopping_patience", self.early_stopping_patience)
        if not self.early_stopping_threshold >= 0:
            raise ConfigurationError(
                f"`early_stopping_threshold` is {self.early_stopping_threshold!r}: give 0 or more."
            )

    def _start_over(self) -> None:
        if self.reset_on_train:
            self.best_metric = self.best_metric_epoch = None
            self.evaluations_without_improvement = 0

    def _judge(self, trainer: Trainer, values: list[float], state: Any = None) -> None:
        for value in values:
            if self._watched.is_better(value, self.best_metric, self.early_stopping_threshold):
                self.best_metric, self.best_metric_epoch = value, trainer.run_history.current_epoch
                self.evaluations_without_improvement = 0
            else:
                self.evaluations_without_improvement += 1
            self._continue(value)

    def _continue(self, latest: float | None = None) -> None:
        """Raise a StopTrainingError if the patience is over."""
        if self.evaluations_without_improvement < self.early_stopping_patience:
            return
        least = f" of at least {self.early_stopping_threshold:g}" if self.early_stopping_threshold else ""
        evaluations = format_count(self.evaluations_without_improvement, "evaluation")
        values = [] if self.best_metric is None else [f"best {self.best_metric:.6g} at epoch {self.best_metric_epoch}"]
        if latest is not None:  # else the run is resumed, and has no new value
            values.append(f"last {latest:.6g}")
        raise StopTrainingError(
            f"{self.watch_metric} had no improvement{least} in {evaluations} (patience {self.early_stopping_patience})"
            + (f": {', '.join(values)}" if values else "")
        )


@dataclasses.dataclass(eq=False, repr=False)
class StopAtCallback(MetricJudge):
    """Ends the run when a metric reaches a value: one that is good enough, or one that shows that the run has diverged.

    ::

        StopAtCallback("eval_accuracy", at_least=0.95)
        StopAtCallback("train_loss_epoch", at_least=10)  # diverged

    Each new value is judged once: at the end of the epoch, or right after an evaluation within an epoch. Values of
    `Trainer.evaluate` are not judged, and NaN reaches nothing. A resumed run that this callback had stopped is stopped
    again, unless the limits have changed.

    Args:
        watch_metric: the metric's name in the run history.
        at_least: the run ends when the metric is this or more.
        at_most: the run ends when the metric is this or less.

    Raises:
        ConfigurationError: if there is no limit, or one is not a number, or every value would end the run.
    """

    watch_metric: str = "eval_loss_epoch"
    _: dataclasses.KW_ONLY
    at_least: float | None = None
    at_most: float | None = None

    latest: float | None = dataclasses.field(default=None, init=False)

    _told_apart_by = "watch_metric"
    _kinds = {"latest": (float, int, type(None))}

    def __post_init__(self) -> None:
        limits = [limit for limit in (self.at_least, self.at_most) if limit is not None]
        if not limits or not all(map(is_finite_number, limits)) or (len(limits) > 1 and limits[0] <= limits[1]):
            raise ConfigurationError(
                f"`StopAtCallback({self.watch_metric!r})` has `at_least` {self.at_least!r} and `at_most` "
                f"{self.at_most!r}. Give a number for one of them, or a range; the run ends outside of it."
            )

    def _start_over(self) -> None:
        self.latest = None

    def _judge(self, trainer: Trainer, values: list[float], state: Any = None) -> None:
        for self.latest in values:
            self._continue()

    def _continue(self) -> None:
        """Raise a StopTrainingError if the latest value ends the run."""
        value = self.latest
        if value is None:
            return
        is_high = self.at_least is not None and value >= self.at_least
        if is_high or (self.at_most is not None and value <= self.at_most):
            limit = f"at least {self.at_least:g}" if is_high else f"at most {self.at_most:g}"
            raise StopTrainingError(f"{self.watch_metric} has reached {value:.6g}, which is {limit}")
