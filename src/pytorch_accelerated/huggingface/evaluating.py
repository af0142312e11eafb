"""Passes over an evaluation set, and the metrics computed from them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from pytorch_accelerated.errors import DataError, HookOutputError, MissingMetricError
from pytorch_accelerated.facts.trees import count_rows, map_leaves
from pytorch_accelerated.huggingface.trainer_utils import EvalLoopOutput, EvalPrediction
from pytorch_accelerated.huggingface.training_args import TrainingArguments
from pytorch_accelerated.prediction.padded import PADDING, PaddedRows, as_objects
from pytorch_accelerated.ranks.ranks import Ranks
from pytorch_accelerated.record.loss import LossTracker

ComputeMetrics = Callable[..., Mapping[str, Any]]
# Losses are read this often. Small tensors that stay among large ones would keep the memory around them occupied.
_LOSSES_AT_ONCE = 64


class EvaluatedBatch(NamedTuple):
    """The results of one batch.

    Attributes:
        items: what the loss is the mean of.
        loss: None without labels.
        rows: the number of rows.
        parts: arguments of an `EvalPrediction`, each None if the batch doesn't have it; empty if only the loss counts.
        parts_of_all: the same for the batches of all ranks, to compute metrics of them.
    """

    items: Any
    loss: Any
    rows: int
    parts: dict[str, Any] = {}
    parts_of_all: dict[str, Any] = {}


@dataclasses.dataclass
class EvaluationCollector:
    """Collects the batches of a pass for the native loop. `finish` gives all processes the same output.

    `args` say what to keep, `keeps_rows` whether outputs are part of the result, and `prediction_padding` pads shorter
    rows of predictions that are integers.
    """

    ranks: Ranks
    args: TrainingArguments
    compute_metrics: ComputeMetrics | None
    prefix: str
    keeps_rows: bool = True
    prediction_padding: int = PADDING

    def __post_init__(self) -> None:
        self._computes_by_batch = self.args.batch_eval_metrics and self.compute_metrics is not None
        self._losses = LossTracker()
        self._number_of_losses = self._num_samples = 0
        paddings = {"predictions": self.prediction_padding}
        self._rows = PaddedRows(self.ranks, joins=self.args.eval_do_concat_batches, paddings=paddings)
        self._waiting: EvalPrediction | None = None  # the last batch must be known as such

    def add(self, start: int, batch: EvaluatedBatch, samples: int | None = None) -> None:
        self._num_samples += batch.rows
        if batch.loss is not None:
            self._losses.update(batch.loss, batch.items)
            self._number_of_losses += 1
            if self._number_of_losses % _LOSSES_AT_ONCE == 0:
                self._losses.read()
        if self.keeps_rows and batch.parts:
            self._rows.add(start, {name: value for name, value in batch.parts.items() if value is not None})
        has_both = batch.parts.get("predictions") is not None and batch.parts.get("label_ids") is not None
        if self._computes_by_batch and has_both:
            self._compute_waiting(compute_result=False)
            self._waiting = EvalPrediction(**batch.parts_of_all)

    def finish(self) -> EvalLoopOutput:
        """Join the rows and compute the metrics. Must be called by all ranks."""
        losses = self._losses
        total, count, num_samples = self.ranks.sum([losses.total_loss, losses.running_count, self._num_samples])
        rows = self._rows.finish() or {}
        metrics = {"loss": total / count, **self._metrics(rows)} if count else self._metrics(rows)
        metrics = {
            name if name.startswith(f"{self.prefix}_") else f"{self.prefix}_{name}": value
            for name, value in metrics.items()
        }
        return EvalLoopOutput(rows.get("predictions"), rows.get("label_ids"), metrics, int(num_samples))

    def abort(self) -> None:
        """Do nothing: nothing is left anywhere."""

    def _metrics(self, rows: dict[str, Any]) -> dict[str, Any]:
        if self.compute_metrics is None:
            return {}
        if self._computes_by_batch:
            # The first rank has had rows in each round.
            metrics: dict[str, Any] = self.ranks.from_first(plain_metrics(self._compute_waiting(compute_result=True)))
            return metrics
        if "predictions" not in rows or "label_ids" not in rows:
            return {}
        extras = {name: rows[name] for name in ("inputs", "losses") if name in rows}
        return plain_metrics(self.compute_metrics(EvalPrediction(rows["predictions"], rows["label_ids"], **extras)))

    def _compute_waiting(self, *, compute_result: bool) -> Any:
        """Call `compute_metrics` for the batch that waits, if there is one."""
        prediction, self._waiting = self._waiting, None
        if prediction is None or self.compute_metrics is None:
            return {}
        return self.compute_metrics(prediction, compute_result=compute_result)


def rows_in(batch: Any) -> int:
    """The number of rows of a batch."""
    size = count_rows(batch)
    if size is None and isinstance(batch, Mapping):
        size = next((len(value) for value in batch.values() if isinstance(value, (list, tuple))), None)
    if size is None:
        raise DataError(f"A batch is a {type(batch).__name__} without a tensor or a list, so its size is unknown.")
    return size


def labels_in(inputs: Any, names: Sequence[str]) -> tuple[Any, ...] | None:
    """The labels of a batch; None if there are no names, or one is missing."""
    labels = tuple(inputs.get(name) for name in names)
    return labels if labels and all(label is not None for label in labels) else None


def outputs_without_loss(outputs: Any, ignored: Sequence[str], *, has_loss: bool) -> Any:
    """The outputs of a model without its loss, with which a tuple begins if it has one: one value, or a tuple."""
    if isinstance(outputs, Mapping):
        left_out = {*ignored, "loss"} if has_loss else {*ignored}
        values = tuple(value for name, value in outputs.items() if name not in left_out)
    elif isinstance(outputs, (tuple, list)):
        values = tuple(outputs[1:] if has_loss else outputs)
    else:
        return outputs
    values = tuple(value for value in values if _is_kept(value))
    return values[0] if len(values) == 1 else values


def _is_kept(value: Any) -> bool:
    """Whether a value is part of the predictions; a cache of `transformers` has no rows, whatever its name is."""
    return value is not None and not hasattr(value, "get_seq_length")


def inputs_for_metrics(batch: Mapping[str, Any], name: str) -> Any:
    """The inputs that metrics need."""
    value = batch[name]
    is_array = isinstance(value, (torch.Tensor, np.ndarray, Mapping)) or (
        isinstance(value, (tuple, list)) and all(isinstance(item, (torch.Tensor, np.ndarray)) for item in value)
    )
    return value if is_array else as_objects(value)


def detached(outputs: Any) -> Any:
    """Nested outputs without their graph, and without values that are None or caches."""
    if isinstance(outputs, torch.Tensor):
        return outputs.detach()
    if isinstance(outputs, Mapping):
        return {name: detached(value) for name, value in outputs.items() if _is_kept(value)}
    if isinstance(outputs, (tuple, list)):
        kept = [detached(value) for value in outputs if _is_kept(value)]
        return tuple(kept) if isinstance(outputs, tuple) else kept
    return outputs


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


def plain_metrics(metrics: Any) -> dict[str, Any]:
    """Metrics that must be a dict with strings as names, with numbers and lists in place of arrays and tensors."""
    if not isinstance(metrics, Mapping):
        raise HookOutputError(f"`compute_metrics` returned {metrics!r:.100}. Return a dict: {{'accuracy': 0.9}}.")
    return {name: map_leaves(_plain, value) for name, value in metrics.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu().numpy()
    if isinstance(value, (np.generic, np.ndarray)):
        return value.item() if value.size == 1 else value.tolist()
    return value
