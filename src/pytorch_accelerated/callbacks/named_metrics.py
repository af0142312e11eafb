"""Metrics by name: which class of torchmetrics a name means, by what outputs and targets look like."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from pytorch_accelerated.errors import ConfigurationError, HookOutputError
from pytorch_accelerated.optional import require

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


class NamedMetrics:
    """Metrics by name, for the task that a first batch of predictions and targets shows.

    Args:
        names: those of `check_names`.
        predictions, targets: of a batch.

    Attributes:
        task: in words.
        metrics: of torchmetrics, by name.

    Raises:
        HookOutputError: if no task has such predictions and targets.
        MissingDependencyError: if torchmetrics is not installed.
    """

    def __init__(self, names: Sequence[str], predictions: Any, targets: Any) -> None:
        self._prefix, arguments, self.task = _task_of(names, predictions, targets)
        torchmetrics = require("torchmetrics", needed_by="MetricsCallback with names")
        classes = torchmetrics.classification if self._prefix else torchmetrics
        self.metrics: dict[str, Metric] = {}
        for name in names:
            kind, further = (_OF_CLASSES if self._prefix else _OF_NUMBERS)[name]
            if self._prefix in ("", "Multiclass"):
                arguments_of_name = {**arguments, **further}
            else:
                arguments_of_name = {**arguments, **{k: v for k, v in further.items() if self._prefix == "Multilabel"}}
            self.metrics[name] = getattr(classes, self._prefix + kind)(**arguments_of_name)

    def rows(self, predictions: Any, targets: Any) -> tuple[Any, Any]:
        """Predictions and targets as these metrics take them."""
        if self._prefix == "Multiclass":
            return predictions, targets
        if predictions.ndim and predictions.shape[-1] == 1 and self._prefix == "Binary":
            predictions = predictions.squeeze(-1)
        targets = targets.reshape(predictions.shape)
        return predictions, targets.long() if self._prefix else targets


def _task_of(names: Sequence[str], predictions: Any, targets: Any) -> tuple[str, Mapping[str, Any], str]:
    """The beginning of the names of classes, their arguments, and the task in words."""
    if isinstance(predictions, torch.Tensor) and isinstance(targets, torch.Tensor):
        if names[0] in _OF_NUMBERS:
            if predictions.numel() == targets.numel():
                return "", {}, "regression"
        elif predictions.numel() == targets.numel():
            columns = predictions.shape[-1] if predictions.ndim > 1 else 1
            if columns == 1:
                return "Binary", {"validate_args": False}, "two classes, from one score for each sample"
            labels = {"num_labels": columns, "validate_args": False}
            return "Multilabel", labels, f"{columns} labels for each sample"
        elif predictions.ndim == targets.ndim + 1 and not targets.is_floating_point():
            classes = predictions.shape[1]
            settings = {"num_classes": classes, "ignore_index": _IGNORED, "validate_args": False}
            return "Multiclass", settings, f"{classes} classes"
    shapes = [
        f"{tuple(each.shape)} {each.dtype}" if isinstance(each, torch.Tensor) else repr(each)[:60]
        for each in (predictions, targets)
    ]
    raise HookOutputError(
        f"The metrics {list(names)} do not fit predictions {shapes[0]} and targets {shapes[1]}. For classes, give a "
        "score for each and whole numbers, or one score and 0 or 1; for numbers, equal shapes. `predictions` and "
        "`targets` of MetricsCallback say what they are."
    )
