"""Metrics by name over one pass, from counts of each class; those that need all scores are torchmetrics' own."""

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

# Metrics that depend on the order of the scores only, and their classes in torchmetrics.
_OF_RANKS = {"auc": "AUROC", "average_precision": "AveragePrecision"}
CLASS_NAMES = (
    *("accuracy", "balanced_accuracy", "precision", "recall", "f1", "iou"),
    *(*_OF_RANKS, "mcc", "top_5_accuracy"),
)
NUMBER_NAMES = ("mae", "mse", "rmse", "r2")
_OTHER_NAMES = {
    "acc": "accuracy",
    "roc_auc": "auc",
    "auroc": "auc",
    "rocauc": "auc",
    "f1_score": "f1",
    "f1score": "f1",
    "jaccard": "iou",
    "mean_iou": "iou",
    "miou": "iou",
    "matthews": "mcc",
    "matthews_corrcoef": "mcc",
    "ap": "average_precision",
    "top5": "top_5_accuracy",
    "mean_absolute_error": "mae",
    "mean_squared_error": "mse",
    "root_mean_squared_error": "rmse",
    "r2_score": "r2",
}
# What torchmetrics leaves out. It would leave out the predictions of an ignored class, too; this is the number of none.
_LEFT_OUT = -100


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
    of_ranks = [name for name in names if name in _OF_RANKS]
    if of_ranks and importlib.util.find_spec("torchmetrics") is None:
        require("torchmetrics", needed_by=f"The metric {of_ranks[0]!r}")


class NamedMetrics:
    """Metrics by name of one pass, of one task.

    Args:
        names: as `check_names` returns them.
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
            of_scores = (*_OF_RANKS, "top_5_accuracy")
            wrong += [name for name in names if name in of_scores or (task.kind != "binary" and name != "accuracy")]
        if "top_5_accuracy" in names and (task.kind != "multiclass" or task.classes < 5):
            wrong.append("top_5_accuracy")
        if wrong:
            possible = (
                NUMBER_NAMES if task.kind == "regression" else [each for each in CLASS_NAMES if each not in wrong]
            )
            remedy = "Pass scores for each class" if task.scores == "classes" else f"There are {', '.join(possible)}"
            raise HookOutputError(
                f"The task is {task.words}, which has no {', '.join(dict.fromkeys(wrong))}. {remedy}, or say "
                "what outputs and targets are: `task`, `predictions` and `targets` of MetricsCallback."
            )
        self._average = asked.average
        made = {name: _metric_of_torchmetrics(name, task, asked) for name in names if name in _OF_RANKS}
        self.metrics: Any = torch.nn.ModuleDict(made).to(device)
        self._numbers = Numbers()
        # For each class, or label: how often it was rightly found, was the target, was found, and could have been.
        self._counts = torch.zeros(4, max(2, task.classes), dtype=torch.int64, device=device)
        # How often the target was among the five highest scores.
        self._among_five = torch.zeros(1, dtype=torch.int64, device=device)
        # Whether a score of the pass was outside of [0, 1]; a target no 0 or 1; a target no number of a class.
        self._seen = torch.zeros(3, dtype=torch.bool, device=device)

    @torch.no_grad()
    def update(self, outputs: torch.Tensor, targets: torch.Tensor) -> None:
        """Add a batch. Does not wait for the device, unless a metric of torchmetrics does."""
        task = self._task
        if task.kind == "regression":
            self._numbers.add(*task.compared(outputs, targets))
            return
        if task.scores == "unsure":
            self._seen[0] |= ((outputs < 0) | (outputs > 1)).any()
            if targets.is_floating_point():
                self._seen[1] |= ((targets != 0) & (targets != 1) & (targets != task.ignored)).any()
        scores, targets = task.compared(outputs, targets)
        counts = targets != task.ignored
        classes = task.classes_of(scores)
        if task.scores != "classes" or task.kind == "binary":
            known = 2 if task.kind != "multiclass" else task.classes
            is_known = (targets >= 0) & (targets < known)
            self._seen[2] |= (counts & ~is_known).any()
            # A target that isn't known is an error at the end of the pass.
            targets = torch.where(is_known, targets, 0).masked_fill(~counts, _LEFT_OUT)
        else:  # nothing says how many classes there are: answers are right, which is class 1, or wrong
            classes, targets = (classes == targets).long(), torch.ones_like(targets)
        self._count(classes, targets, counts)
        if "top_5_accuracy" in self._names:
            self._among_five += (scores.topk(5, 1).indices == targets[:, None]).sum()
        for metric in self.metrics.values():
            metric.update(*self._for_ranks(self._ranked(scores), targets))

    def _count(self, classes: torch.Tensor, targets: torch.Tensor, counts: torch.Tensor) -> None:
        right = (classes == targets) & counts
        if self._task.kind == "labels":
            is_target, is_found = counts & (targets == 1), counts & (classes == 1)
            self._counts += torch.stack([each.sum(0) for each in (is_target & is_found, is_target, is_found, counts)])
            return
        size = self._counts.shape[1]
        places, where = torch.cat([targets, targets + size, classes + 2 * size]), torch.cat([right, counts, counts])
        self._counts.view(-1).scatter_add_(0, torch.where(where, places, 0), where.long())  # of one dimension: exact
        self._counts[3] += counts.sum()

    def _for_ranks(self, ranked: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Scores and targets, in the form that the metric of `auc` or `average_precision` takes."""
        if self._task.kind == "binary" and self._average is not None:
            ranked = torch.stack([1 - ranked, ranked], 1)
        if self._average == "micro":
            if targets.ndim == 1:
                each = torch.arange(ranked.shape[1], device=targets.device)
                targets = torch.where(targets[:, None] == _LEFT_OUT, _LEFT_OUT, (targets[:, None] == each).long())
            return ranked.reshape(-1), targets.reshape(-1)
        return ranked, targets

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
        """What is known of the pass so far, in host memory."""
        known = {"counts": self._counts, "among_five": self._among_five, "seen": self._seen}
        return {**{name: each.cpu() for name, each in known.items()}, "numbers": self._numbers.state()}

    def add_state(self, state: Mapping[str, Any]) -> None:
        """Add what another process, or an earlier one, knows."""
        self._counts += state["counts"].to(self._counts)
        self._among_five += state["among_five"].to(self._among_five)
        self._seen |= state["seen"].to(self._seen)
        self._numbers.merge(state["numbers"], self._device)

    def values(self) -> dict[str, Any]:
        """The values of all names; NaN if nothing counts.

        Raises:
            HookOutputError: if the whole pass leaves open what its scores or targets are.
        """
        if self._task.kind == "regression":
            values = self._numbers.values()
            return {name: values[name] for name in self._names}
        self._refuse_two_readings()
        if not self._counts[3].any():
            return dict.fromkeys(self._names, math.nan)
        return {name: self._value(name) for name in self._names}

    def _value(self, name: str) -> float:
        """The value of one name, as scikit-learn defines it."""
        if name in _OF_RANKS:
            return self._averaged(name, self.metrics[name].compute())
        right, truth, found, counting = self._counts.cpu().double()
        is_of_labels = self._task.kind == "labels"
        if is_of_labels:  # for each label two classes: not there, and there
            absent = counting - truth - found + right
            pairs = (absent, right), (counting - truth, truth), (counting - found, found)
            right, truth, found = (torch.stack(pair, 1) for pair in pairs)
        else:
            right, truth, found = right[None], truth[None], found[None]
        if name == "accuracy":
            return float(right.sum() / truth.sum())
        if name == "top_5_accuracy":
            return float(self._among_five.cpu() / truth.sum())
        if name == "balanced_accuracy":  # the mean recall of the classes that are there; of labels, the mean over them
            return float((right / truth).nanmean(-1).nanmean())
        if name == "mcc":
            return float(correlation(right, truth, found).mean())
        if is_of_labels or (self._task.kind == "binary" and self._average is None):
            right, truth, found = right[:, 1], truth[:, 1], found[:, 1]
        if self._average == "micro":
            right, truth, found = right.sum(), truth.sum(), found.sum()
        whole = {"precision": found, "recall": truth, "f1": (truth + found) / 2, "iou": truth + found - right}[name]
        # Classes that are neither there nor found have no part in a mean; labels always have.
        part = truth if self._average == "weighted" else (truth + found > 0) | is_of_labels
        values = torch.where(whole > 0, right / whole, 0.0) * part
        return float(values.sum() / part.sum()) if part.any() else 0.0

    def _averaged(self, name: str, values: torch.Tensor) -> float:
        """One value from the values of the classes.

        Where a class is missing among the targets, or is the only one, its area is not defined, and so is the mean. The
        average precision of a missing class is 0. Weighted means leave missing classes out.
        """
        _, support, _, counting = self._counts.cpu().double()
        if self._average == "micro":
            support, counting = support.sum(), counting.sum()
        elif values.ndim == 0:  # of the class 1
            support, counting = support[1], counting[1]
        is_undefined = (support == 0) | (support == counting) if name == "auc" else support == 0
        values = torch.where(is_undefined, math.nan if name == "auc" else 0.0, values.cpu().double())
        if self._average != "weighted":
            return float(values.mean())
        there = support > 0
        return float((values[there] * support[there]).sum() / support.sum())

    def _refuse_two_readings(self) -> None:
        is_outside, has_fractions, has_others = self._seen.tolist()
        if has_others:
            numbers = "0 and 1" if self._task.kind != "multiclass" else f"0 to {self._task.classes - 1}"
            raise HookOutputError(
                f"The task is {self._task.words}, whose targets are {numbers}, or {self._task.ignored}, which does not "
                "count; but there were others. Convert them, for example by `targets` of MetricsCallback, or say by "
                "`ignore_index` which one does not count."
            )
        if self._task.scores != "unsure":
            return
        of_ranks = {name for name in self._names if name in _OF_RANKS}
        by_threshold = self._task.kind != "multiclass" and self._task.classes != 2 and len(of_ranks) < len(self._names)
        if not is_outside and (by_threshold or (self._task.kind == "multiclass" and of_ranks)):
            raise HookOutputError(
                "All scores of a whole pass are between 0 and 1, so they can be logits, where above 0 is class 1, or "
                "probabilities, where above 1/2 is, and the loss function does not tell. Say which to MetricsCallback: "
                "`scores='logits'` or `scores='probabilities'`."
            )
        if has_fractions and not self._is_asked:
            raise HookOutputError(
                "Targets other than 0 and 1 are not classes, and the loss function does not tell what they are. Say "
                "`task` to MetricsCallback, by which those above 1/2 belong to a class, or pass metrics of numbers: "
                f"{', '.join(NUMBER_NAMES)}."
            )


def _metric_of_torchmetrics(name: str, task: Task, asked: Asked) -> Any:
    torchmetrics = require("torchmetrics", needed_by=f"The metric {name!r}")
    of_task, classes = {"labels": "multilabel"}.get(task.kind, task.kind), task.classes
    if asked.average == "micro":
        of_task = "binary"
    elif task.kind == "binary" and asked.average is not None:
        of_task, classes = "multiclass", 2  # each of the two counts
    sizes = {"num_classes": classes, "num_labels": classes}
    settings: dict[str, Any] = {"average": "none", "ignore_index": _LEFT_OUT, "validate_args": False}
    return getattr(torchmetrics, _OF_RANKS[name])(of_task, **sizes, **settings)


class Numbers:
    """Errors of numbers over one pass, and the spread of their targets, for each column, in double precision.

    The spread is merged by the formula of Chan, Golub and LeVeque (1979): the difference of two large sums would lose
    the digits of targets that are far from 0.

    Attributes:
        rows: how many.
        columns: sums of absolute errors, of squared errors, means of the targets, and sums of their squared distances
            from the mean: [4, columns]; None before a batch.
    """

    def __init__(self) -> None:
        self.rows = 0
        self.columns: torch.Tensor | None = None

    def add(self, outputs: torch.Tensor, targets: torch.Tensor) -> None:
        """Add the rows of a batch; all dimensions but the first are columns."""
        wide = widest_float(outputs.device)
        predicted, truth = (each.reshape(len(outputs), -1).to(wide) for each in (outputs, targets))
        errors, mean = predicted - truth, truth.mean(0)
        columns = [errors.abs().sum(0), errors.square().sum(0), mean, (truth - mean).square().sum(0)]
        self.merge({"rows": len(outputs), "columns": torch.stack(columns)}, outputs.device)

    def merge(self, other: Mapping[str, Any], device: torch.device) -> None:
        """Add what `state` of another one returned."""
        rows, columns = other["rows"], other["columns"]
        if columns is None:
            return
        columns = columns.to(device)
        if self.columns is None:
            self.rows, self.columns = rows, columns.clone()
            return
        together = self.rows + rows
        distance = columns[2] - self.columns[2]
        spread = distance.square() * (self.rows * rows / together)
        mean = self.columns[2] + distance * (rows / together)
        self.columns = torch.stack([*(self.columns + columns)[:2], mean, self.columns[3] + columns[3] + spread])
        self.rows = together

    def state(self) -> dict[str, Any]:
        """What is known so far, in host memory."""
        return {"rows": self.rows, "columns": None if self.columns is None else self.columns.cpu()}

    def values(self) -> dict[str, float]:
        """Means over the columns, as in scikit-learn; NaN without rows, and r2 also for a single one."""
        if self.columns is None:
            return dict.fromkeys(NUMBER_NAMES, math.nan)
        absolute, squares, _, spread = self.columns.double().cpu()
        # Where all targets are equal, scikit-learn takes 1 for no error, and 0 else.
        share = torch.where(spread > 0, 1 - squares / spread, (squares == 0).double())
        return {
            "mae": float(absolute.mean() / self.rows),
            "mse": float(squares.mean() / self.rows),
            "rmse": float((squares / self.rows).sqrt().mean()),
            "r2": float(share.mean()) if self.rows > 1 else math.nan,
        }


def correlation(right: torch.Tensor, truth: torch.Tensor, found: torch.Tensor) -> torch.Tensor:
    """Matthews' correlation coefficient, by Gorodkin (2004) for any number of classes.

    0 if all of one side are of one class, as in scikit-learn.

    Args:
        right: how often each class was rightly found: [..., classes].
        truth: how often it was the target.
        found: how often it was found.
    """
    total = truth.sum(-1)
    covariance = right.sum(-1) * total - (truth * found).sum(-1)
    spread = (total**2 - truth.square().sum(-1)).sqrt() * (total**2 - found.square().sum(-1)).sqrt()
    return torch.where(spread > 0, covariance / spread, 0.0)
