"""The losses that a training logs, and its best metric."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from pytorch_accelerated.callbacks.warning import warn_user
from pytorch_accelerated.errors import MissingMetricError

if TYPE_CHECKING:
    from pytorch_accelerated.facts.context import Context
    from pytorch_accelerated.huggingface.events import TrainerState
    from pytorch_accelerated.huggingface.training_args import TrainingArguments
    from pytorch_accelerated.processes.ranks import Ranks


class LossLog:
    """Takes the losses of the steps since the last log, which may have been in an earlier epoch.

    Args:
        context: of the training. Its loss tracker holds one loss for each step, and its holder has the progress.

    Attributes:
        last_step: that was logged.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._total = self._count = 0.0
        self.last_step: int = context.holder.state.global_step

    def take(self) -> tuple[float, int]:
        """The mean loss of the steps since the last call, and the number of steps left out, with a warning.

        Must be called by all ranks.
        """
        tracker, ranks, step = self._context.losses, self._context.ranks, self._context.holder.state.global_step
        steps = step - self.last_step
        total, count = ranks.sum([tracker.total_loss, tracker.running_count])
        tracker.reset()
        self.last_step = step
        self._total += total
        self._count += count
        left_out = math.ceil(steps - count / ranks.count)
        if left_out:
            warn_user(
                ranks,
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
