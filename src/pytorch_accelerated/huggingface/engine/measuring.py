"""The losses that a training logs, and its best metric."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from pytorch_accelerated.callbacks.warning import warn_user
from pytorch_accelerated.errors import MissingMetricError
from pytorch_accelerated.huggingface.arguments.fields import IntervalStrategy
from pytorch_accelerated.huggingface.trainer_callback import is_log_due

if TYPE_CHECKING:
    from pytorch_accelerated.huggingface.engine.training import FaceTraining
    from pytorch_accelerated.huggingface.events import TrainerState
    from pytorch_accelerated.huggingface.training_args import TrainingArguments
    from pytorch_accelerated.processes.ranks import Ranks


class TrainingLog:
    """Logs the losses of a training: those of the steps since the last log, which may have been in an earlier epoch.

    Args:
        training: whose loss tracker holds one loss for each step.
    """

    def __init__(self, training: FaceTraining) -> None:
        self._training = training
        self._total = self._count = 0.0
        self._last_step: int = training.face.state.global_step

    def may_be_due(self) -> bool:
        """Whether the current update may be logged: callbacks decide only after it."""
        face = self._training.face
        return (
            face.control.should_log
            or face.callback_handler.ranks_agree_after_each_update()
            or face.args.logging_strategy == IntervalStrategy.EPOCH
            or is_log_due(face.args, face.state, face.state.global_step + 1)
        )

    def write(self) -> None:
        """Log the mean loss of the steps since the last log, if there were any. Must be called by all ranks."""
        training, step = self._training, self._training.face_step
        if training.face.state.global_step == self._last_step:
            return
        mean, left_out = self.take()
        logs: dict[str, Any] = {"loss": mean}
        norm = step.gradient_norm
        if norm is not None:
            logs["grad_norm"] = norm
        logs["learning_rate"] = float(step.learning_rate)
        if left_out:
            logs["non_finite_losses"] = left_out
        # An overridden `log` need not have the second parameter if tokens are not counted.
        training.face.log(logs, *([training.started] if training.counter.counts_tokens else []))

    def take(self) -> tuple[float, int]:
        """The mean loss of the steps since the last call, and the number of steps left out, with a warning.

        Must be called by all ranks.
        """
        context, step = self._training.context, self._training.face.state.global_step
        steps, self._last_step = step - self._last_step, step
        total, count = context.ranks.sum([context.losses.total_loss, context.losses.running_count])
        context.losses.reset()
        self._total += total
        self._count += count
        left_out = math.ceil(steps - count / context.ranks.count)
        if left_out:
            warn_user(
                context.ranks,
                f"{left_out} of the last {steps} losses were NaN or infinite (up to step {step}). The logged mean "
                "leaves them out, because of `logging_nan_inf_filter`; the weights may be spoilt anyway. Lower the "
                "learning rate, or look for bad rows.",
            )
        # If none counts, use the mean of the run so far.
        return (total / count if count else self.mean), left_out

    @property
    def mean(self) -> float:
        """The mean of all losses that were taken; NaN without any."""
        return self._total / self._count if self._count else math.nan


def note_if_best(state: TrainerState, args: TrainingArguments, metrics: dict[str, float], ranks: Ranks) -> bool:
    """Note the metric in `state` if it is the best so far, and return whether it is.

    Raises:
        MissingMetricError: a KeyError, if ``metric_for_best_model`` is not among `metrics`.
    """
    name = args.metric_for_best_model
    if name is None:
        return False
    value = metric_of(metrics, name)
    if math.isnan(value):
        warn_user(
            ranks,
            f"`metric_for_best_model`, {name!r}, is NaN at step {state.global_step}, so this is not the best model "
            "whatever others are. Look at the evaluation set, and at the logged losses for NaN.",
        )
    best, sign = state.best_metric, 1 if args.greater_is_better else -1
    if math.isnan(value) or (best is not None and not sign * value > sign * best):
        return False
    state.best_metric, state.best_global_step = value, state.global_step
    return True


def metric_of(metrics: dict[str, float], name: str) -> float:
    """A metric of an evaluation, whose name may lack its prefix.

    Raises:
        MissingMetricError: a KeyError; names those that there are.
    """
    name = name if name.startswith("eval_") else f"eval_{name}"
    if name not in metrics:
        raise MissingMetricError(
            f"`metric_for_best_model` is {name!r}, which the evaluation does not have. There is: "
            f"{', '.join(map(repr, metrics))}. Choose one of these, or return it from `compute_metrics`."
        )
    return metrics[name]
