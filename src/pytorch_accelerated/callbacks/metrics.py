"""Metrics of torchmetrics in training and evaluation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from pytorch_accelerated.callbacks.base import TrainerCallback
from pytorch_accelerated.callbacks.progress import LogMetricsCallback
from pytorch_accelerated.callbacks.warning import warn_user
from pytorch_accelerated.checkpointing.loading import explained_loading
from pytorch_accelerated.checkpointing.matching import require_kinds
from pytorch_accelerated.compat.torchmetrics import reductions_of, set_update_count
from pytorch_accelerated.errors import ConfigurationError, HookOutputError
from pytorch_accelerated.optional import require
from pytorch_accelerated.tracking.values import on_host
from pytorch_accelerated.trees import map_leaves

if TYPE_CHECKING:
    from torchmetrics import Metric, MetricCollection

    from pytorch_accelerated.callbacks.base import Trainer
    from pytorch_accelerated.processes.ranks import Ranks


class MetricsCallback(TrainerCallback):
    """Computes metrics over each whole training epoch and evaluation, and records them in the run history.

    ::

        accuracy = torchmetrics.Accuracy(task="multiclass", num_classes=10)
        Trainer(..., callbacks=[MetricsCallback({"accuracy": accuracy}), *DEFAULT_CALLBACKS])

    records ``train_accuracy``, ``eval_accuracy`` and, for evaluations within an epoch, ``intermediate_eval_accuracy``.
    Put this callback before the callbacks that log. Override `get_predictions_and_targets` if your batches or outputs
    have another structure.

    With several ranks, the values are those of one process with all samples, if the metric can be merged: each rank
    updates its own copy, without waiting for the others, and the copies are merged when the value is computed. Ranks
    without a batch do not count. The copies are saved with training states, so a resumed epoch has the same metrics.

    Many metrics of torchmetrics check the values of each batch, which makes the host wait for the device, unless they
    are created with ``validate_args=False``. Metrics of probabilities, such as AUROC, convert a batch of logits only if
    a logit is outside [0, 1], so pass probabilities.

    Args:
        metrics: a metric, a sequence of metrics or a `MetricCollection` (named by their classes), or metrics by name.
            They are copied. A `MetricCollection` keeps its compute groups. Otherwise, each metric is updated by itself,
            because torchmetrics would group metrics whose states happen to be equal after the first batch.
        during_training: whether to compute them in training.
        during_evaluation: whether to compute them in evaluations.
    """

    ranks_agree_after_each_update = False

    metrics: Any = ()
    during_training = True
    during_evaluation = True
    _collections: Mapping[str, MetricCollection] = {}  # by the prefix of the names under which they are recorded
    _restored: Mapping[str, list[dict[str, Any]]] = {}
    _ranks: Ranks | None = None
    _has_warned = False

    def __init__(
        self,
        metrics: Metric | MetricCollection | Sequence[Metric] | Mapping[str, Metric | MetricCollection],
        *,
        during_training: bool = True,
        during_evaluation: bool = True,
    ) -> None:
        self.metrics = _as_collection(metrics)
        self.during_training = during_training
        self.during_evaluation = during_evaluation

    def get_predictions_and_targets(self, batch: Any, batch_output: dict[str, Any]) -> tuple[Any, Any]:
        """The predictions and targets with which the metrics are updated.

        By default, these are `model_outputs` (or its entry "logits", if it is a dict) and the batch's second item (or
        its entry "labels", if it is a dict).

        Args:
            batch: on the trainer's device.
            batch_output: the output of `calculate_train_batch_loss` or `calculate_eval_batch_loss`.
        """
        outputs = batch_output["model_outputs"]
        try:
            predictions = outputs["logits"] if isinstance(outputs, Mapping) else outputs
            targets = batch["labels"] if isinstance(batch, Mapping) else batch[1]
        except (KeyError, IndexError, TypeError) as error:
            raise HookOutputError(
                f"MetricsCallback found no predictions and targets in a batch ({type(batch).__name__}) and its "
                f"outputs ({type(outputs).__name__}). Override `get_predictions_and_targets` to say where they are."
            ) from error
        return predictions, targets

    def on_training_run_start(self, trainer: Trainer, **kwargs: Any) -> None:
        """Check the order of the callbacks."""
        self._warn_if_logged_before(trainer)

    def on_evaluation_run_start(self, trainer: Trainer, **kwargs: Any) -> None:
        """Check the order of the callbacks."""
        self._warn_if_logged_before(trainer)

    def on_train_epoch_start(self, trainer: Trainer, **kwargs: Any) -> None:
        """Reset the metrics, unless the epoch is resumed."""
        if self.during_training:
            collection = self._collection(trainer, "train_")
            if trainer.run_state.updates_in_epoch == 0:
                collection.reset()

    def on_train_step_end(
        self, trainer: Trainer, batch: Any, batch_output: dict[str, Any], step: int = 0, **kwargs: Any
    ) -> None:
        """Update the metrics with a batch."""
        if self.during_training:
            self._update(self._collection(trainer, "train_"), batch, batch_output)

    def on_train_epoch_end(self, trainer: Trainer, **kwargs: Any) -> None:
        """Record the metrics of the epoch."""
        if self.during_training:
            self._record(trainer, "train_")

    def on_eval_epoch_start(self, trainer: Trainer, is_intermediate: bool = False, **kwargs: Any) -> None:
        """Reset the metrics."""
        if self.during_evaluation:
            self._collection(trainer, "eval_").reset()

    def on_eval_step_end(self, trainer: Trainer, batch: Any, batch_output: dict[str, Any], **kwargs: Any) -> None:
        """Update the metrics with a batch."""
        if self.during_evaluation:
            self._update(self._collection(trainer, "eval_"), batch, batch_output)

    def on_eval_epoch_end(self, trainer: Trainer, is_intermediate: bool = False, **kwargs: Any) -> None:
        """Record the metrics of the evaluation."""
        if self.during_evaluation:
            self._record(trainer, "eval_", name_prefix="intermediate_eval_" if is_intermediate else "eval_")

    def state_dict(self) -> dict[str, Any]:
        """The states of the metrics on every rank in an unfinished epoch. Must be called by all ranks."""
        own = {key: _read_states(collection) for key, collection in self._collections.items()}
        everyones = [own] if self._ranks is None else self._ranks.exchange(own)
        keys = sorted({key for states in everyones for key in states if states[key]})
        return {**self._restored, **{key: [states.get(key, {}) for states in everyones] for key in keys}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore these states; they are distributed over the ranks when they are needed."""
        kinds = {"its own": ()} if not isinstance(state, dict) else dict.fromkeys(state, (list,))
        require_kinds(state, kinds, of=type(self).__name__)
        self._restored = state

    def _collection(self, trainer: Trainer, purpose: str) -> MetricCollection:
        """The metrics of training or of evaluations; another model, whose metrics have a prefix, has its own."""
        key = trainer.run_history.metric_name_prefix + purpose
        if key not in self._collections:
            self._collections = {**self._collections, key: _as_collection(self.metrics).to(trainer.device)}
            self._ranks = trainer.internal_run.ranks
        if key in self._restored:
            saved = self._restored[key][trainer.internal_run.ranks.index :: trainer.internal_run.ranks.count]
            self._restored = {other: states for other, states in self._restored.items() if other != key}
            self._collections[key].reset()
            with explained_loading(type(self).__name__, "the training state"):
                _refuse_what_cannot_be_continued(self._collections[key], saved)
                _write_states(self._collections[key], saved)
        return self._collections[key]

    def _update(self, collection: MetricCollection, batch: Any, batch_output: dict[str, Any]) -> None:
        predictions, targets = self.get_predictions_and_targets(batch, batch_output)
        if isinstance(predictions, torch.Tensor):
            predictions = predictions.detach()  # metrics that keep predictions would keep the graph of every batch
        collection.update(predictions, targets)

    def _record(self, trainer: Trainer, purpose: str, *, name_prefix: str | None = None) -> None:
        collection = self._collection(trainer, purpose)
        if trainer.internal_run.ranks.count > 1:
            _write_states(collection, trainer.internal_run.ranks.exchange(_read_states(collection)))
        for name, value in collection.compute().items():
            trainer.run_history.update_metric((name_prefix or purpose) + name, value)
        collection.reset()

    def _warn_if_logged_before(self, trainer: Trainer) -> None:
        callbacks = list(trainer.callback_handler)
        before = callbacks[: callbacks.index(self)] if self in callbacks else []
        loggers = [callback for callback in before if isinstance(callback, LogMetricsCallback)]
        if loggers and not self._has_warned:
            self._has_warned = True
            warn_user(
                trainer.internal_run.ranks,
                f"{type(self).__name__} comes after {type(loggers[0]).__name__} in the list of callbacks, so its "
                "metrics are recorded too late to be logged together with the loss. Put it before.",
            )


def _as_collection(metrics: Any) -> MetricCollection:
    """A fresh copy of `metrics` that does not exchange states itself.

    The exchange of torchmetrics fails if a rank has no state or a state of another type.
    """
    torchmetrics = require("torchmetrics", extra="metrics", needed_by="MetricsCallback")
    copied: MetricCollection
    if isinstance(metrics, torchmetrics.MetricCollection):
        copied = metrics.clone()
    else:
        metrics = dict(metrics) if isinstance(metrics, Mapping) else metrics
        copied = torchmetrics.MetricCollection(metrics, compute_groups=False).clone()
    for _, metric in _metrics_within(copied):
        metric.distributed_available_fn = _never
    copied.reset()
    return copied


def _never() -> bool:
    return False


def _metrics_within(collection: MetricCollection) -> Iterator[tuple[str, Metric]]:
    """Every metric by its path in the collection, including metrics inside other metrics."""
    from torchmetrics import Metric

    return ((name, module) for name, module in collection.named_modules() if isinstance(module, Metric))


def _read_states(collection: MetricCollection) -> dict[str, Any]:
    """Copies in host memory of the states of this rank's metrics, without metrics that were never updated."""
    return {
        name: {"updates": metric.update_count, "values": on_host(metric.metric_state)}
        for name, metric in _metrics_within(collection)
        if metric.update_called
    }


def _write_states(collection: MetricCollection, parts: Sequence[Mapping[str, Any]]) -> None:
    """Give the metrics the merged states of all `parts`, which are results of `_read_states`."""
    for name, metric in _metrics_within(collection):
        states = [part[name] for part in parts if name in part]
        if states:
            for attribute, value in _merged(metric, [state["values"] for state in states]).items():
                setattr(metric, attribute, _on_device(value, metric.device))
            set_update_count(metric, sum(state["updates"] for state in states))


def _merged(metric: Metric, parts: list[dict[str, Any]]) -> dict[str, Any]:
    if len(parts) == 1:
        return parts[0]
    merged: dict[str, Any] = {}
    for attribute, reduction in reductions_of(metric).items():
        values = [part[attribute] for part in parts]
        if isinstance(values[0], list):
            merged[attribute] = [item for value in values for item in value]
        else:
            stacked = torch.stack(values)
            merged[attribute] = reduction(stacked) if callable(reduction) else stacked
    return merged


def _refuse_what_cannot_be_continued(collection: MetricCollection, parts: Sequence[Mapping[str, Any]]) -> None:
    """Reject metrics that can be computed from the states of several ranks, but not updated after that."""
    for name, metric in _metrics_within(collection):
        is_merge = sum(name in part for part in parts) > 1
        for attribute, reduction in reductions_of(metric).items():
            if is_merge and reduction is None and isinstance(getattr(metric, attribute), torch.Tensor):
                raise ConfigurationError(
                    f"The metric {name!r} ({type(metric).__name__}) was saved within an epoch on more ranks than there "
                    "are now, and torchmetrics cannot merge its states into fewer. Resume on at least as many ranks, "
                    "or from a state that was saved between epochs, or without this metric in training."
                )


def _on_device(state: Any, device: torch.device) -> Any:
    return map_leaves(lambda leaf: leaf.to(device) if isinstance(leaf, torch.Tensor) else leaf, state)
