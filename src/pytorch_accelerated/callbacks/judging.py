"""The callbacks that judge each value of a metric once."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from pytorch_accelerated.errors import UnknownMetricError
from pytorch_accelerated.facts.names import is_users_class
from pytorch_accelerated.loop.callback import TrainerCallback
from pytorch_accelerated.record.watching import WatchedMetric
from pytorch_accelerated.states.matching import require_kinds

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
            self._watched.check_direction(trainer.run_context.ranks, type(self).__name__)
        if trainer.run_state.updates > 0:
            self._continue()
        else:
            self._new_values(trainer)  # those of earlier runs belong to other weights
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
    is_known = len(recorded) == len(callbacks) and None not in recorded and not trainer.run_context.loaders.eval_sets
    if not is_known or any(is_users_class(type(each)) for each in (trainer, history, *callbacks)):
        return
    names = ["train_loss_epoch", "eval_loss_epoch", *(each for names in recorded for each in names or ())]
    at_times = ["intermediate_eval_loss", "gradient_norm", "skipped_updates", *history.get_metric_names()]
    if name not in names + at_times:
        near = difflib.get_close_matches(name, names, n=1)
        hint = f"Watch {near[0]!r}" if near else f"Watch one of {', '.join(map(repr, names))}"
        raise UnknownMetricError(f"The watched metric is {name!r}, which nothing in this run records. {hint}.")
