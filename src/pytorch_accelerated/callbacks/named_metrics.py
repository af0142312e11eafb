"""Metrics by name over one pass: means are computed here, exactly; the others by torchmetrics."""

from __future__ import annotations

import difflib
import importlib.util
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from pytorch_accelerated.callbacks.tasks import Asked, Task
from pytorch_accelerated.errors import ConfigurationError, HookOutputError
from pytorch_accelerated.facts.optional import require
from pytorch_accelerated.record.loss import widest_float

MEANS = ("accuracy", "mae", "mse", "rmse")
# For each other name the class without its task, and whether it takes scores rather than classes.
_OF_CLASSES = {
    "balanced_accuracy": ("ConfusionMatrix", False),
    "precision": ("Precision", False),
    "recall": ("Recall", False),
    "f1": ("F1Score", False),
    "auc": ("AUROC", True),
    "average_precision": ("AveragePrecision", True),
    "mcc": ("ConfusionMatrix", False),
    "top_5_accuracy": ("Accuracy", True),
}
CLASS_NAMES = ("accuracy", *_OF_CLASSES)
NUMBER_NAMES = ("mae", "mse", "rmse", "r2")
_OTHER_NAMES = {
    "acc": "accuracy",
    "roc_auc": "auc",
    "auroc": "auc",
    "rocauc": "auc",
    "f1_score": "f1",
    "f1score": "f1",
    "matthews": "mcc",
    "matthews_corrcoef": "mcc",
    "ap": "average_precision",
    "top5": "top_5_accuracy",
    "mean_absolute_error": "mae",
    "mean_squared_error": "mse",
    "root_mean_squared_error": "rmse",
    "r2_score": "r2",
}
_AVERAGED = ("precision", "recall", "f1", "average_precision", "auc")


def check_names(names: Sequence[str]) -> None:
    """Reject a name that means no metric, names of different tasks, and names whose package is missing.

    Raises:
        ConfigurationError: says which there are, and which was probably meant.
        MissingDependencyError: if a name needs torchmetrics, which is not installed.
    """
    known = (*CLASS_NAMES, *NUMBER_NAMES)
    for name in (name for name in names if name not in known):
        meant = _OTHER_NAMES.get(name.lower()) or next(iter(difflib.get_close_matches(name.lower(), known, n=1)), None)
        raise ConfigurationError(
            f"There is no metric {name!r}.{f' Did you mean {meant!r}?' if meant else ''} There are "
            f"{', '.join(CLASS_NAMES)} for classes, and {', '.join(NUMBER_NAMES)} for numbers. For others, pass "
            "metrics of torchmetrics, or functions by name."
        )
    of_numbers = [name for name in names if name in NUMBER_NAMES]
    if 0 < len(of_numbers) < len(names):
        of_classes = [name for name in names if name in CLASS_NAMES]
        raise ConfigurationError(
            f"The metrics {', '.join(of_numbers)} are for numbers, and {', '.join(of_classes)} for classes: outputs "
            "are the one or the other. Pass those of one kind, or two callbacks with their own `predictions` and "
            "`targets`."
        )
    others = [name for name in names if name not in MEANS]
    if others and importlib.util.find_spec("torchmetrics") is None:
        require("torchmetrics", needed_by=f"The metric {others[0]!r}")


class NamedMetrics:
    """Metrics by name of one pass, of one task.

    Args:
        names: those of `check_names`.
        task: of the run.
        asked: what the user says of it.
        device: of the outputs.

    Attributes:
        metrics: of torchmetrics, by name.

    Raises:
        HookOutputError: if a name has no meaning for the task.
    """

    def __init__(self, names: Sequence[str], task: Task, asked: Asked, device: torch.device) -> None:
        self._names, self._task, self._device, self._is_asked = list(names), task, device, asked.task is not None
        wrong = [name for name in names if (name in NUMBER_NAMES) != (task.kind == "regression")]
        if task.scores == "classes":
            wrong += [name for name in names if name in _OF_CLASSES and (_OF_CLASSES[name][1] or task.kind != "binary")]
        if "top_5_accuracy" in names and (task.kind != "multiclass" or task.classes < 5):
            wrong.append("top_5_accuracy")
        if wrong:
            possible = NUMBER_NAMES if task.kind == "regression" else CLASS_NAMES
            remedy = "Pass scores for each class" if task.scores == "classes" else f"There are {', '.join(possible)}"
            raise HookOutputError(
                f"The task is {task.words}, of which there is no {', '.join(dict.fromkeys(wrong))}. {remedy}, or say "
                "what outputs and targets are: `task`, `predictions` and `targets` of MetricsCallback."
            )
        of_torchmetrics = [name for name in names if name not in MEANS]
        self.metrics = {name: _metric_of_torchmetrics(name, task, asked).to(device) for name in of_torchmetrics}
        self._sums = torch.zeros(len(self._names), 2, dtype=widest_float(device), device=device)
        # Whether a score of the pass was outside of [0, 1], and a target no 0 or 1.
        self._seen = torch.zeros(2, dtype=torch.bool, device=device)

    @torch.no_grad()
    def update(self, outputs: torch.Tensor, targets: torch.Tensor) -> None:
        """Add a batch. Does not wait for the device, unless a metric of torchmetrics does."""
        task = self._task
        if task.scores == "unsure":
            self._seen[0] |= ((outputs < 0) | (outputs > 1)).any()
            if targets.is_floating_point():
                self._seen[1] |= ((targets != 0) & (targets != 1)).any()
        scores, targets = task.compared(outputs, targets)
        if task.kind == "regression":
            self._add_numbers(scores, targets)
            return
        counts = targets != task.ignored
        classes = self._classes_of(scores)
        if "accuracy" in self._names:
            self._add("accuracy", ((classes == targets) & counts).sum(), counts.sum())
        for name, metric in self.metrics.items():
            metric.update(self._ranked(scores) if _OF_CLASSES[name][1] else classes, targets)

    def _add_numbers(self, outputs: torch.Tensor, targets: torch.Tensor) -> None:
        wide = widest_float(self._device)
        differences = outputs.to(wide) - targets.to(wide)
        for name in self._names:
            if name in MEANS:
                errors = differences.abs() if name == "mae" else differences.square()
                self._add(name, errors.sum(), torch.tensor(errors.numel()))
        for metric in self.metrics.values():
            rows = outputs.reshape(len(outputs), -1), targets.reshape(len(targets), -1)
            metric.update(*(each.to(wide).squeeze(1) for each in rows))

    def _add(self, name: str, total: torch.Tensor, count: torch.Tensor) -> None:
        self._sums[self._names.index(name)] += torch.stack([total, count.to(total.device)]).to(self._sums.dtype)

    def _classes_of(self, scores: torch.Tensor) -> torch.Tensor:
        task = self._task
        if task.scores == "classes":
            return scores.long()
        if task.kind == "multiclass":
            return scores.argmax(1)
        return (scores > (0.5 if task.scores == "probabilities" and not self._is_difference else 0)).long()

    @property
    def _is_difference(self) -> bool:
        """Whether a score is the difference of two."""
        return self._task.kind == "binary" and self._task.classes == 2 and self._task.scores != "probabilities"

    def _ranked(self, scores: torch.Tensor) -> torch.Tensor:
        """Scores in [0, 1], where torchmetrics takes them as they are, with the order and the ties of the given ones.

        In double precision, since a sigmoid in single precision makes large scores equal.
        """
        scores = scores.to(widest_float(self._device))
        if self._task.scores == "probabilities":
            return scores
        if self._task.kind == "multiclass":
            return scores.softmax(1)
        return 0.5 + 0.5 * scores / (1 + scores.abs())

    def state(self) -> dict[str, Any]:
        """What is known of the means so far, in host memory."""
        return {"sums": self._sums.cpu(), "seen": self._seen.cpu()}

    def add_state(self, state: Mapping[str, Any]) -> None:
        """Add what another process, or an earlier one, knows."""
        self._sums += state["sums"].to(self._sums)
        self._seen |= state["seen"].to(self._seen)

    def values(self) -> dict[str, Any]:
        """The values of all names.

        Raises:
            HookOutputError: if the whole pass leaves open what its scores or targets are.
        """
        self._refuse_two_readings()
        found: dict[str, Any] = {}
        for name, (total, count) in zip(self._names, self._sums.tolist(), strict=True):
            if name in MEANS:
                mean = total / count if count else math.nan
                found[name] = mean**0.5 if name == "rmse" else mean
            else:
                value = self.metrics[name].compute()
                found[name] = _OF_CONFUSION[name](value) if name in _OF_CONFUSION else value
        return found

    def _refuse_two_readings(self) -> None:
        if self._task.scores != "unsure":
            return
        is_outside, has_fractions = self._seen.tolist()
        of_ranks = {name for name in self._names if name in ("auc", "average_precision")}
        by_threshold = self._task.kind != "multiclass" and self._task.classes != 2 and len(of_ranks) < len(self._names)
        if not is_outside and (by_threshold or (self._task.kind == "multiclass" and of_ranks)):
            raise HookOutputError(
                "All scores of a whole pass are between 0 and 1, so they can be logits, where above 0 is class 1, or "
                "probabilities, where above 1/2 is, and the loss function does not tell. Say which to MetricsCallback: "
                "`scores='logits'` or `scores='probabilities'`."
            )
        if has_fractions and not self._is_asked:
            raise HookOutputError(
                "Targets other than 0 and 1 are no classes, and the loss function does not tell what they are. Say "
                "`task` to MetricsCallback, by which those above 1/2 belong to a class, or pass metrics of numbers: "
                f"{', '.join(NUMBER_NAMES)}."
            )


def _metric_of_torchmetrics(name: str, task: Task, asked: Asked) -> Any:
    torchmetrics = require("torchmetrics", needed_by=f"The metric {name!r}")
    if task.kind == "regression":
        return torchmetrics.R2Score().set_dtype(torch.float64)
    kind, _ = _OF_CLASSES[name]
    prefixes = {"binary": "Binary", "multiclass": "Multiclass", "labels": "Multilabel"}
    arguments: dict[str, Any] = {"ignore_index": task.ignored, "validate_args": False}
    is_averaged = name in _AVERAGED and asked.average is not None
    prefix = prefixes[task.kind]
    if prefix == "Binary" and is_averaged and name != "auc":
        prefix, arguments["num_classes"] = "Multiclass", 2
    elif prefix != "Binary":
        arguments["num_classes" if prefix == "Multiclass" else "num_labels"] = task.classes
    if name in _AVERAGED and prefix != "Binary":
        arguments["average"] = asked.average or "macro"
    if name == "top_5_accuracy":
        arguments |= {"top_k": 5, "average": "micro"}
    metric: Any = getattr(torchmetrics.classification, prefix + kind)(**arguments)
    return metric


def balanced(confusion: torch.Tensor) -> torch.Tensor:
    """Balanced accuracy: the mean recall of the classes that are there; of several labels, the mean over labels.

    Args:
        confusion: [classes, classes] or [labels, 2, 2], rows: truth.
    """
    rows = confusion.double()
    support = rows.sum(-1)
    recall = rows.diagonal(dim1=-2, dim2=-1) / support
    per_label = torch.where(support > 0, recall, torch.nan).nanmean(-1)
    return per_label.nanmean()


def correlation(confusion: torch.Tensor) -> torch.Tensor:
    """Matthews' correlation coefficient, by Gorodkin (2004) for any number of classes; over all labels together.

    0 if all of one side are of one class, as in scikit-learn.

    Args:
        confusion: as in `balanced`.
    """
    rows = confusion.double().reshape(-1, *confusion.shape[-2:]).sum(0)
    total, truth, found = rows.sum(), rows.sum(1), rows.sum(0)
    covariance = rows.trace() * total - truth @ found
    spread = (total**2 - truth @ truth).sqrt() * (total**2 - found @ found).sqrt()
    return covariance / spread if spread else torch.zeros_like(covariance)


_OF_CONFUSION = {"balanced_accuracy": balanced, "mcc": correlation}
