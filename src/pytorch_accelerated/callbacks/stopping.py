"""Callbacks that end a run early: because a loss is not finite, or because of the values of a metric."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pytorch_accelerated.callbacks.base import TrainerCallback
from pytorch_accelerated.callbacks.watching import KINDS_OF_BEST, WatchedMetric, is_finite_number
from pytorch_accelerated.checkpointing.matching import require_kinds
from pytorch_accelerated.errors import ConfigurationError, NonFiniteLossError, StopTrainingError
from pytorch_accelerated.facts.settings import check_positive_count
from pytorch_accelerated.models.numerics import described_parameters
from pytorch_accelerated.progress.formats import format_count

if TYPE_CHECKING:
    from pytorch_accelerated.callbacks.base import Trainer

_KINDS = {**KINDS_OF_BEST, "evaluations_without_improvement": (int,)}  # of what `EarlyStoppingCallback` saves


class TerminateOnNaNCallback(TrainerCallback):
    """Ends a run with an error, on every rank, when the loss of a batch is NaN or infinite.

    The loop reads losses from the device in bulk, so some updates may have followed the bad batch. The model is not
    saved after that.
    """

    def on_non_finite_loss(self, trainer: Trainer, metric_name: str, epoch: int, step: int, **kwargs: Any) -> None:
        """End the run.

        Raises:
            NonFiniteLossError: names the epoch, the first such batch and the metric.
        """
        place, consequence = f"In epoch {epoch}", f"{metric_name!r} and every later update"
        remedy = "; else try a smaller learning rate, a warmup, `gradient_clip_norm`, or bf16 instead of fp16"
        hint = (
            " To learn which module's output is the first that is not finite, train with `nonfinite_policy='skip'`, "
            "which looks for it while batch and weights are still there."
        )
        if not metric_name.startswith("train"):
            is_in_training = trainer.run_history.updates_done > 0
            place = f"In the evaluation of epoch {epoch}" if is_in_training else "In the evaluation"
            consequence, remedy, hint = repr(metric_name), "", ""
        raise NonFiniteLossError(
            f"{place}, the loss of batch {step} (counted from 0) is NaN or infinite, so {consequence} would be "
            "meaningless. Look for bad values in that batch and for a division, root or logarithm of 0 in the loss"
            f"{remedy}. {described_parameters(trainer.get_model())}{hint}"
        )


class _MetricJudge(TrainerCallback):
    """Judges each new value of a metric once: at the end of the epoch, or right after an evaluation within an epoch.

    A resumed run that the callback had stopped is stopped again.
    """

    takes_part_in_preflight = False
    _told_apart_by = "watch_metric"

    watch_metric = "eval_loss_epoch"
    _latest: float | None = None

    def on_training_run_start(self, trainer: Trainer, **kwargs: Any) -> None:
        """Start anew, unless the run is resumed. A resumed run that this callback had stopped is stopped again.

        Raises:
            ConfigurationError: for a metric of evaluations, if there is no evaluation set.
        """
        self._watched.check_has_evaluation(trainer.eval_dataset)
        if trainer.run_state.updates == 0:
            self._new_values(trainer)  # those of earlier runs have been judged then
            self._latest = None
            self._start_anew()
        else:
            self._stop_if_due()

    def on_eval_epoch_end(self, trainer: Trainer, is_intermediate: bool = False, **kwargs: Any) -> None:
        """Judge an evaluation within an epoch."""
        if is_intermediate:
            self._judge_new(trainer)

    def on_training_run_epoch_end(self, trainer: Trainer, **kwargs: Any) -> None:
        """Judge the epoch, after every callback has recorded its metrics.

        Raises:
            UnknownMetricError: if the metric has no value yet.
        """
        self._watched.check_recorded(trainer.run_history, trainer.run_context.ranks)
        self._judge_new(trainer)

    @property
    def _watched(self) -> WatchedMetric:
        return WatchedMetric(self.watch_metric, getattr(self, "greater_is_better", False))

    def _new_values(self, trainer: Trainer) -> list[float]:
        return self._watched.new_values(trainer.run_history, trainer.run_context.ranks, self.state_key)

    def _judge_new(self, trainer: Trainer) -> None:
        for value in self._new_values(trainer):
            self._latest = value
            self._judge(value, trainer.run_history.current_epoch)
            self._stop_if_due()

    def _start_anew(self) -> None:
        """Forget what is known of earlier runs."""

    def _judge(self, value: float, epoch: int) -> None:
        """Note a new value."""

    def _stop_if_due(self) -> None:
        """Raise a StopTrainingError if the values so far end the run."""


class EarlyStoppingCallback(_MetricJudge):
    """Ends the run at the first value of a metric that is not better than the best by 0.01: both numbers are arguments.

    As in pytorch-accelerated 0.1.61, the defaults are a patience of 1 and an absolute threshold of 0.01, which is large
    for a loss of 0.05: most runs want ``EarlyStoppingCallback(5, early_stopping_threshold=0)`` or so.

    Every value is judged once: those of an epoch and its evaluation at the end of the epoch, those of an evaluation
    within an epoch right after that evaluation. Values of `Trainer.evaluate` are not judged.

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

    early_stopping_patience = 1
    early_stopping_threshold = 0.01
    greater_is_better = False
    reset_on_train = True

    best_metric: float | None = None
    best_metric_epoch: int | None = None
    evaluations_without_improvement = 0

    def __init__(
        self,
        early_stopping_patience: int = 1,
        early_stopping_threshold: float = 0.01,
        watch_metric: str = "eval_loss_epoch",
        greater_is_better: bool = False,
        reset_on_train: bool = True,
    ) -> None:
        check_positive_count("early_stopping_patience", early_stopping_patience)
        if not early_stopping_threshold >= 0:
            raise ConfigurationError(
                f"`early_stopping_threshold` is {early_stopping_threshold!r}, but it is the smallest change of "
                "the metric that counts as an improvement: give 0 or more."
            )
        self.early_stopping_patience = early_stopping_patience
        self.early_stopping_threshold = early_stopping_threshold
        self.watch_metric = watch_metric
        self.greater_is_better = greater_is_better
        self.reset_on_train = reset_on_train

    def state_dict(self) -> dict[str, Any]:
        """The last improvement, and the number of values since then."""
        return {name: getattr(self, name) for name in _KINDS}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the last improvement."""
        require_kinds(state, _KINDS, of=type(self).__name__)
        vars(self).update({name: state[name] for name in _KINDS})

    def _start_anew(self) -> None:
        if self.reset_on_train:
            self.best_metric = self.best_metric_epoch = None
            self.evaluations_without_improvement = 0

    def _judge(self, value: float, epoch: int) -> None:
        if self._watched.is_better(value, self.best_metric, self.early_stopping_threshold):
            self.best_metric, self.best_metric_epoch = value, epoch
            self.evaluations_without_improvement = 0
        else:
            self.evaluations_without_improvement += 1

    def _stop_if_due(self) -> None:
        if self.evaluations_without_improvement < self.early_stopping_patience:
            return
        least = f" of at least {self.early_stopping_threshold:g}" if self.early_stopping_threshold else ""
        evaluations = format_count(self.evaluations_without_improvement, "evaluation")
        values = [] if self.best_metric is None else [f"best {self.best_metric:.6g} at epoch {self.best_metric_epoch}"]
        if self._latest is not None:  # else the run is resumed, and has no new value
            values.append(f"last {self._latest:.6g}")
        raise StopTrainingError(
            f"{self.watch_metric} had no improvement{least} in {evaluations} (patience {self.early_stopping_patience})"
            + (f": {', '.join(values)}" if values else "")
        )


class StopAtCallback(_MetricJudge):
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

    def __init__(
        self, watch_metric: str = "eval_loss_epoch", *, at_least: float | None = None, at_most: float | None = None
    ) -> None:
        limits = [limit for limit in (at_least, at_most) if limit is not None]
        if not limits or not all(map(is_finite_number, limits)) or (len(limits) > 1 and limits[0] <= limits[1]):
            raise ConfigurationError(
                f"`StopAtCallback({watch_metric!r})` has `at_least` {at_least!r} and `at_most` {at_most!r}, but the "
                "run should end at some values and not at others. Give a number for one of them, or a range outside of "
                "which the run should end."
            )
        self.watch_metric = watch_metric
        self.at_least = at_least
        self.at_most = at_most

    def state_dict(self) -> dict[str, Any]:
        """The latest value."""
        return {"latest": self._latest}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the latest value."""
        require_kinds(state, {"latest": (float, int, type(None))}, of=type(self).__name__)
        self._latest = state["latest"]

    def _stop_if_due(self) -> None:
        value = self._latest
        if value is None:
            return
        if self.at_least is not None and value >= self.at_least:
            raise StopTrainingError(f"{self.watch_metric} has reached {value:.6g}, which is at least {self.at_least:g}")
        if self.at_most is not None and value <= self.at_most:
            raise StopTrainingError(f"{self.watch_metric} has reached {value:.6g}, which is at most {self.at_most:g}")
