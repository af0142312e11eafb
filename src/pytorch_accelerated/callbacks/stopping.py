"""Ends a run before its time: because it is broken, or because it does not get better."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pytorch_accelerated.callbacks.base import TrainerCallback
from pytorch_accelerated.callbacks.watching import KINDS_OF_BEST, WatchedMetric
from pytorch_accelerated.checkpointing.likeness import require_kinds
from pytorch_accelerated.errors import ConfigurationError, NonFiniteLossError, StopTrainingError
from pytorch_accelerated.training.settings import check_positive_count

if TYPE_CHECKING:
    from pytorch_accelerated.trainer import Trainer


class TerminateOnNaNCallback(TrainerCallback):
    """Ends a run with an error, on every rank, when the loss of a batch is NaN or infinite.

    It reads nothing itself: the loop reads losses in bulk, so some updates may have followed the bad batch. Nothing
    is saved from the model after that.
    """

    def on_non_finite_loss(self, trainer: Trainer, metric_name: str, epoch: int, step: int, **kwargs: Any) -> None:
        """End the run.

        Raises:
            NonFiniteLossError: naming the epoch, the first such batch, and the metric it belongs to.
        """
        raise NonFiniteLossError(
            f"In epoch {epoch}, the loss of batch {step} (counted from 0) is NaN or infinite, so {metric_name!r} and "
            "every later update would be meaningless. Look for bad values in that batch and for a division, root or "
            "logarithm of 0 in the loss; else try a smaller learning rate, a warmup, `gradient_clip_norm`, or bf16 "
            "instead of fp16."
        )


class EarlyStoppingCallback(TrainerCallback):
    """Ends the run when a metric has not got better for a while.

    Every new value of the metric is judged once: those of an epoch and its evaluation when the epoch is over, those
    of an evaluation inside an epoch right after it. `Trainer.evaluate` is not judged.

    Args:
        early_stopping_patience: the run ends at the so many-th value in a row that is no improvement.
        early_stopping_threshold: a change smaller than this is no improvement; absolute, in units of the metric.
        watch_metric: its name in the run history.
        greater_is_better: whether larger values are better.
        reset_on_train: False to go on judging by the `best_metric` of an earlier call of `train`.

    Attributes:
        best_metric: the last value that was an improvement, which the next one is compared with, or None. Later ones
            may be better by less than the threshold.
        best_metric_epoch: the epoch it was recorded in, or None.
        evaluations_without_improvement: in a row, up to now.

    Raises:
        ConfigurationError: if the patience is less than 1, or the threshold is negative or not a number.
    """

    takes_part_in_preflight = False

    early_stopping_patience = 1
    early_stopping_threshold = 0.01
    watch_metric = "eval_loss_epoch"
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
                f"`early_stopping_threshold` is {early_stopping_threshold!r}, but it is the least change of the metric "
                "that counts as an improvement: give 0 or more."
            )
        self.early_stopping_patience = early_stopping_patience
        self.early_stopping_threshold = early_stopping_threshold
        self.watch_metric = watch_metric
        self.greater_is_better = greater_is_better
        self.reset_on_train = reset_on_train

    @property
    def state_key(self) -> str:
        """The class and the watched metric: several metrics may be watched in one run."""
        return f"{type(self).__name__}({self.watch_metric})"

    def on_training_run_start(self, trainer: Trainer, **kwargs: Any) -> None:
        """Begin anew, unless the run is resumed; a resumed run that had been stopped here stops again.

        Raises:
            ConfigurationError, UnknownMetricError: if the metric will not be recorded.
        """
        self._watched.check_before_run(trainer)
        if trainer.run_state.updates == 0:
            self._watched.new_values(trainer, self.state_key)  # those of earlier runs have been judged then
            if self.reset_on_train:
                self.best_metric = self.best_metric_epoch = None
                self.evaluations_without_improvement = 0
        elif self._is_patience_over:
            self._stop(trainer)

    def on_eval_epoch_end(self, trainer: Trainer, is_intermediate: bool = False, **kwargs: Any) -> None:
        """Judge an evaluation inside an epoch."""
        if is_intermediate:
            self._judge(trainer)

    def on_training_run_epoch_end(self, trainer: Trainer, **kwargs: Any) -> None:
        """Judge the epoch, now that every callback has recorded its metrics.

        Raises:
            UnknownMetricError: if the metric has no value by then.
        """
        self._watched.check_recorded(trainer)
        self._judge(trainer)

    def state_dict(self) -> dict[str, Any]:
        """The last improvement, and how long ago it was."""
        return {
            "best_metric": self.best_metric,
            "best_metric_epoch": self.best_metric_epoch,
            "evaluations_without_improvement": self.evaluations_without_improvement,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        require_kinds(state, {**KINDS_OF_BEST, "evaluations_without_improvement": (int,)}, of=type(self).__name__)
        self.best_metric = state["best_metric"]
        self.best_metric_epoch = state["best_metric_epoch"]
        self.evaluations_without_improvement = state["evaluations_without_improvement"]

    @property
    def _watched(self) -> WatchedMetric:
        return WatchedMetric(self.watch_metric, self.greater_is_better)

    @property
    def _is_patience_over(self) -> bool:
        return self.evaluations_without_improvement >= self.early_stopping_patience

    def _judge(self, trainer: Trainer) -> None:
        for value in self._watched.new_values(trainer, self.state_key):
            if self._watched.is_better(value, self.best_metric, self.early_stopping_threshold):
                self.best_metric, self.best_metric_epoch = value, trainer.run_history.current_epoch
                self.evaluations_without_improvement = 0
            else:
                self.evaluations_without_improvement += 1
            if self._is_patience_over:
                self._stop(trainer)

    def _stop(self, trainer: Trainer) -> None:
        reference = "" if self.best_metric is None else f" on {self.best_metric:.6g} (epoch {self.best_metric_epoch})"
        evaluations = f"evaluation{'s' if self.evaluations_without_improvement > 1 else ''}"
        raise StopTrainingError(
            f"{self.watch_metric} has not improved by {self.early_stopping_threshold:g}{reference} in the last "
            f"{self.evaluations_without_improvement} {evaluations}"
        )
