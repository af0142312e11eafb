"""Passes over an evaluation set: results of batches, and the metrics computed from them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from pytorch_accelerated.errors import DataError, HookOutputError
from pytorch_accelerated.huggingface.trainer_utils import EvalLoopOutput, EvalPrediction
from pytorch_accelerated.prediction.padded import PADDING, PaddedRows, as_objects
from pytorch_accelerated.processes.ranks import Ranks
from pytorch_accelerated.tracking.loss import LossTracker
from pytorch_accelerated.trees import count_rows, map_leaves

if TYPE_CHECKING:
    from pytorch_accelerated.huggingface.training_args import TrainingArguments


ComputeMetrics = Callable[..., Mapping[str, Any]]
# Losses are read this often. Small tensors that stay among large ones would keep the memory around them occupied.
_LOSSES_AT_ONCE = 64


@dataclasses.dataclass(frozen=True)
class EvaluatedBatch:
    """The results of one batch: its number of rows, the mean loss over them, and what there is of the other three.

    `of_all` has those of all ranks, to compute metrics of the batch.
    """

    size: int
    loss: Any = None
    logits: Any = None
    labels: Any = None
    inputs: Any = None
    of_all: EvaluatedBatch | None = None


class EvaluationCollector:
    """Collects the batches of a pass for the native loop. `finish` gives all processes the same output.

    `args` say what to keep, `keeps_rows` whether outputs are part of the result, and `prediction_padding` pads shorter
    rows of predictions that are integers.
    """

    def __init__(
        self,
        ranks: Ranks,
        args: TrainingArguments,
        *,
        prediction_loss_only: bool,
        compute_metrics: ComputeMetrics | None,
        prefix: str,
        keeps_rows: bool = True,
        prediction_padding: int = PADDING,
    ) -> None:
        self._ranks = ranks
        self._prediction_loss_only = prediction_loss_only
        self._compute_metrics = compute_metrics
        self._prefix = prefix
        self._keeps_losses = "loss" in args.include_for_metrics
        self._keeps_rows = keeps_rows
        self._computes_by_batch = args.batch_eval_metrics and compute_metrics is not None
        self._losses = LossTracker()
        self._number_of_losses = 0
        self._num_samples = 0
        paddings = {"predictions": prediction_padding}
        self._rows = PaddedRows(ranks, joins=args.eval_do_concat_batches, paddings=paddings)
        self._waiting: EvalPrediction | None = None  # the last batch must be known as such

    def add(self, start: int, batch: EvaluatedBatch, samples: int | None = None) -> None:
        self._num_samples += batch.size
        if batch.loss is not None:
            self._losses.update(batch.loss, batch.size)
            self._number_of_losses += 1
            if self._number_of_losses % _LOSSES_AT_ONCE == 0:
                self._losses.read()
        if self._prediction_loss_only:
            return
        if self._keeps_rows:
            rows = self._rows_of(batch)
            self._rows.add(start, {name: value for name, value in rows.items() if value is not None})
        if self._computes_by_batch and batch.logits is not None and batch.labels is not None:
            self._compute_waiting(compute_result=False)
            self._waiting = EvalPrediction(**self._rows_of(batch.of_all or batch))

    def _rows_of(self, batch: EvaluatedBatch) -> dict[str, Any]:
        losses = batch.loss.expand(batch.size) if self._keeps_losses and batch.loss is not None else None
        return {"predictions": batch.logits, "label_ids": batch.labels, "inputs": batch.inputs, "losses": losses}

    def finish(self) -> EvalLoopOutput:
        """Join the rows and compute the metrics. Must be called by all ranks."""
        total, count, num_samples = self._ranks.sum(
            [self._losses.total_loss, self._losses.running_count, self._num_samples]
        )
        rows = self._rows.finish() or {}
        metrics = {"loss": total / count, **self._metrics(rows)} if count else self._metrics(rows)
        metrics = {
            name if name.startswith(f"{self._prefix}_") else f"{self._prefix}_{name}": value
            for name, value in metrics.items()
        }
        return EvalLoopOutput(rows.get("predictions"), rows.get("label_ids"), metrics, int(num_samples))

    def abort(self) -> None:
        """Do nothing: nothing is left anywhere."""

    def _metrics(self, rows: dict[str, Any]) -> dict[str, Any]:
        if self._compute_metrics is None:
            return {}
        if self._computes_by_batch:
            # The first rank has had rows in each round.
            metrics: dict[str, Any] = self._ranks.from_first(plain_metrics(self._compute_waiting(compute_result=True)))
            return metrics
        if "predictions" not in rows or "label_ids" not in rows:
            return {}
        extras = {name: rows[name] for name in ("inputs", "losses") if name in rows}
        return plain_metrics(self._compute_metrics(EvalPrediction(rows["predictions"], rows["label_ids"], **extras)))

    def _compute_waiting(self, *, compute_result: bool) -> Any:
        """Call `compute_metrics` for the batch that waits, if there is one."""
        prediction, self._waiting = self._waiting, None
        if prediction is None or self._compute_metrics is None:
            return {}
        return self._compute_metrics(prediction, compute_result=compute_result)


def rows_in(batch: Any) -> int:
    """The number of rows of a batch."""
    size = count_rows(batch)
    if size is None and isinstance(batch, Mapping):
        size = next((len(value) for value in batch.values() if isinstance(value, (list, tuple))), None)
    if size is None:
        raise DataError(
            f"A batch is a {type(batch).__name__} without a tensor or a list in it, so its number of rows is unknown."
        )
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
    values = tuple(value for value in values if value is not None)
    return values[0] if len(values) == 1 else values


def inputs_for_metrics(batch: Mapping[str, Any], name: str) -> Any:
    """The inputs that metrics need."""
    value = batch[name]
    is_array = isinstance(value, (torch.Tensor, np.ndarray, Mapping)) or (
        isinstance(value, (tuple, list)) and all(isinstance(item, (torch.Tensor, np.ndarray)) for item in value)
    )
    return value if is_array else as_objects(value)


def detached(outputs: Any) -> Any:
    """Nested outputs without their graph, and without values that are None."""
    if isinstance(outputs, torch.Tensor):
        return outputs.detach()
    if isinstance(outputs, Mapping):
        return {name: detached(value) for name, value in outputs.items() if value is not None}
    if isinstance(outputs, (tuple, list)):
        kept = [detached(value) for value in outputs if value is not None]
        return tuple(kept) if isinstance(outputs, tuple) else kept
    return outputs


def plain_metrics(metrics: Any) -> dict[str, Any]:
    """Metrics that must be a dict with strings as names, with numbers and lists in place of arrays and tensors."""
    if not isinstance(metrics, Mapping):
        raise HookOutputError(
            f"`compute_metrics` returned {metrics!r:.100}. Return a dict, for example {{'accuracy': 0.9}}."
        )
    return {name: map_leaves(_plain, value) for name, value in metrics.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu().numpy()
    if isinstance(value, (np.generic, np.ndarray)):
        return value.item() if value.size == 1 else value.tolist()
    return value
