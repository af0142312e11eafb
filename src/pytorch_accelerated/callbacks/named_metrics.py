"""Metrics by name: which class of torchmetrics a name means, by what outputs and targets look like."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from pytorch_accelerated.errors import ConfigurationError, HookOutputError
from pytorch_accelerated.facts.error_notes import described
from pytorch_accelerated.facts.optional import require

if TYPE_CHECKING:
    from torchmetrics import Metric

_MACRO = {"average": "macro"}
# For each name the class without its task, and arguments where there are several classes or labels.
_OF_CLASSES: dict[str, tuple[str, dict[str, Any]]] = {
    "accuracy": ("Accuracy", {"average": "micro"}),
    "balanced_accuracy": ("Accuracy", _MACRO),
    "precision": ("Precision", _MACRO),
    "recall": ("Recall", _MACRO),
    "f1": ("F1Score", _MACRO),
    "auc": ("AUROC", _MACRO),
    "average_precision": ("AveragePrecision", _MACRO),
    "mcc": ("MatthewsCorrCoef", {}),
    "top_5_accuracy": ("Accuracy", {"average": "micro", "top_k": 5}),
}
_OF_NUMBERS: dict[str, tuple[str, dict[str, Any]]] = {
    "mae": ("MeanAbsoluteError", {}),
    "mse": ("MeanSquaredError", {}),
    "rmse": ("MeanSquaredError", {"squared": False}),
    "r2": ("R2Score", {}),
}
_IGNORED = -100  # the label that losses of torch and transformers leave out


def check_names(names: Sequence[str]) -> None:
    """Reject a name that means no metric, and names of which some are for classes and others for numbers.

    Raises:
        ConfigurationError: says which there are.
    """
    unknown = [name for name in names if name not in {**_OF_CLASSES, **_OF_NUMBERS}]
    of_numbers = [name for name in names if name in _OF_NUMBERS]
    if unknown or 0 < len(of_numbers) < len(names):
        raise ConfigurationError(
            f"The metrics {list(names)} are not known, or belong to different tasks. There are "
            f"{', '.join(_OF_CLASSES)} for classes, and {', '.join(_OF_NUMBERS)} for numbers. For others, pass metrics "
            "of torchmetrics, or functions by name."
        )


class Task(NamedTuple):
    """What predictions and targets are compared as.

    Attributes:
        prefix: the beginning of the names of classes in torchmetrics; empty for numbers.
        arguments: of these classes.
        words: the task in words.
    """

    prefix: str
    arguments: dict[str, Any]
    words: str


def metrics_by_name(names: Sequence[str], task: Task) -> dict[str, Metric]:
    """Metrics of torchmetrics.

    Args:
        names: those of `check_names`.
        task: of `task_of`.

    Raises:
        MissingDependencyError: if torchmetrics is not installed.
    """
    torchmetrics = require("torchmetrics", needed_by="MetricsCallback with names")
    classes = torchmetrics.classification if task.prefix else torchmetrics
    metrics = {}
    for name in names:
        kind, further = (_OF_CLASSES if task.prefix else _OF_NUMBERS)[name]
        further = {} if task.prefix == "Binary" else further  # there is nothing to average over
        metrics[name] = getattr(classes, task.prefix + kind)(**task.arguments, **further)
    return metrics


def rows_for(task: Task, predictions: Any, targets: Any) -> tuple[Any, Any]:
    """Predictions and targets in the form that the metrics of a task take."""
    if task.prefix == "Multiclass":
        return predictions, targets
    if predictions.ndim > 1 and predictions.shape[-1] == 1:
        predictions = predictions.squeeze(-1)
    targets = targets.reshape(predictions.shape)
    return predictions, targets.long() if task.prefix else targets


def task_of(names: Sequence[str], predictions: Any, targets: Any) -> Task:
    """The task that a batch of predictions and targets shows.

    Raises:
        HookOutputError: if no task has such predictions and targets.
    """
    if isinstance(predictions, torch.Tensor) and isinstance(targets, torch.Tensor):
        if names[0] in _OF_NUMBERS:
            if predictions.numel() == targets.numel():
                return Task("", {}, "regression")
        elif predictions.numel() == targets.numel():
            columns = predictions.shape[-1] if predictions.ndim > 1 else 1
            if columns == 1:
                return Task("Binary", {"validate_args": False}, "two classes, one score for each sample")
            labels = {"num_labels": columns, "validate_args": False}
            return Task("Multilabel", labels, f"{columns} labels of each sample")
        elif predictions.ndim == targets.ndim + 1 and not targets.is_floating_point():
            classes = predictions.shape[1]
            settings = {"num_classes": classes, "ignore_index": _IGNORED, "validate_args": False}
            return Task("Multiclass", settings, f"{classes} classes")
    raise HookOutputError(
        f"The metrics {list(names)} do not fit the predictions, {described(predictions)}, and the targets, "
        f"{described(targets)}. For classes, give a score for each and whole numbers, or one score and 0 or 1; for "
        "numbers, equal shapes. `predictions` and `targets` of MetricsCallback say what they are."
    )
