"""What the outputs of a model are, and what the targets: the one place that decides it, for metrics and for reports."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from typing import Any

import torch
from torch import nn

from pytorch_accelerated.errors import ConfigurationError, HookOutputError
from pytorch_accelerated.facts.error_notes import described

KINDS = ("binary", "multiclass", "labels", "regression")
SCORES = ("logits", "probabilities")
AVERAGES = ("macro", "micro", "weighted")
_IGNORED = -100  # no class has a negative number, so this one of torch's losses can be left out everywhere
_F = nn.functional
# For losses of torch the tasks that they are for, and what the outputs are.
_LOSSES: dict[Any, tuple[str, str]] = {
    **dict.fromkeys((nn.CrossEntropyLoss, _F.cross_entropy, nn.NLLLoss, _F.nll_loss), ("multiclass", "logits")),
    **dict.fromkeys((nn.MultiMarginLoss, _F.multi_margin_loss), ("multiclass", "logits")),
    **dict.fromkeys((nn.BCEWithLogitsLoss, _F.binary_cross_entropy_with_logits), ("labels", "logits")),
    **dict.fromkeys((nn.MultiLabelSoftMarginLoss, _F.multilabel_soft_margin_loss), ("labels", "logits")),
    **dict.fromkeys((nn.BCELoss, _F.binary_cross_entropy), ("labels", "probabilities")),
    **dict.fromkeys((nn.MSELoss, _F.mse_loss, nn.L1Loss, _F.l1_loss), ("regression", "numbers")),
    **dict.fromkeys((nn.SmoothL1Loss, _F.smooth_l1_loss, nn.HuberLoss, _F.huber_loss), ("regression", "numbers")),
}


@dataclasses.dataclass(frozen=True)
class Asked:
    """What the user says of the task; None: it is inferred.

    Attributes:
        task: one of `KINDS`.
        classes_dim: the dimension of the outputs that has the classes, or the labels.
        ignore_index: the target that does not count.
        scores: one of `SCORES`.
        average: over the classes; with one, both of two classes count.
    """

    task: str | None = None
    classes_dim: int | None = None
    ignore_index: int | None = None
    scores: str | None = None
    average: str | None = None

    def __post_init__(self) -> None:
        for name, words in (("task", KINDS), ("scores", SCORES), ("average", AVERAGES)):
            if getattr(self, name) not in (None, *words):
                raise ConfigurationError(f"`{name}` is {getattr(self, name)!r}: choose one of {', '.join(words)}.")


@dataclasses.dataclass(frozen=True)
class Task:
    """How outputs and targets are compared, in the whole run.

    Attributes:
        kind: one of `KINDS`.
        classes: how many classes or labels there are; 1 for the others.
        dim: the dimension of the outputs that has them; None if they have none.
        scores: "logits", "probabilities", "classes" (the outputs are class numbers), "numbers", or "unsure": logits, as
            long as a score of the run is below 0 or above 1.
        ignored: the target that does not count, among whole numbers.
    """

    kind: str
    classes: int = 1
    dim: int | None = None
    scores: str = "logits"
    ignored: int = _IGNORED

    @property
    def words(self) -> str:
        """The task in words."""
        what = {
            "binary": "two classes",
            "multiclass": f"{self.classes} classes",
            "labels": f"{self.classes} labels of each sample",
            "regression": "numbers",
        }[self.kind]
        return what + {"probabilities": ", from probabilities", "classes": ", from class numbers"}.get(self.scores, "")

    def compared(self, outputs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Outputs and targets as rows: scores [n], [n, classes] or [n, labels], and targets [n] or [n, labels].

        For numbers both have one shape. Targets of a floating type are of the class with the highest one, or of the
        class 1 if they are above 1/2. Targets that do not count are still there.
        """
        if self.kind == "regression":
            outputs, targets = _without_last(outputs, targets)
            return outputs, targets.reshape(outputs.shape)
        if self.kind == "multiclass" and self.dim is not None:
            if targets.ndim == outputs.ndim:
                targets = targets.argmax(self.dim)
            return outputs.movedim(self.dim, -1).reshape(-1, self.classes), targets.reshape(-1).long()
        if self.kind == "binary" and self.dim is not None and self.classes == 2:  # the difference of two scores
            if targets.ndim == outputs.ndim and targets.shape == outputs.shape:
                targets = targets.select(self.dim, 1)
            first, second = outputs.select(self.dim, 0), outputs.select(self.dim, 1)
            outputs = second if self.scores == "probabilities" else second - first
        if targets.is_floating_point():
            targets = torch.where(targets == self.ignored, self.ignored, (targets > 0.5).long())
        if self.kind == "labels":
            assert self.dim is not None
            rows = [each.movedim(self.dim, -1).reshape(-1, self.classes) for each in (outputs, targets)]
            return rows[0], rows[1].long()
        return outputs.reshape(-1), targets.reshape(-1).long()

    def classes_of(self, scores: torch.Tensor) -> torch.Tensor:
        """The class of each row of scores as `compared` gives them; with labels, 1 for each that a row has."""
        if self.scores == "classes":
            return scores.long()
        if self.kind == "multiclass":
            return scores.argmax(1)
        return (scores > (0.5 if self.scores == "probabilities" else 0.0)).long()


def kind_of_task(
    loss_func: Any, outputs: Any, targets: Any, asked: Asked | None = None, *, numbers: bool = False
) -> Task:
    """The task, from the shapes and dtypes of a batch and the loss; the values of the batch are not looked at.

    Args:
        loss_func: of the trainer; None if the model has its own.
        outputs: of the model for a batch.
        targets: of the batch.
        asked: what the user says.
        numbers: whether metrics of numbers are asked for.

    Raises:
        HookOutputError: if no reading fits, or more than one; shows them, and what to say.
    """
    asked = asked or Asked()
    if not isinstance(outputs, torch.Tensor) or not isinstance(targets, torch.Tensor) or not outputs.ndim:
        raise _no_task(outputs, targets, "they are not tensors with a row for each sample")
    kind, of_loss = _of_loss(loss_func) or (None, "unsure")
    scores = (asked.scores or of_loss) if outputs.is_floating_point() else "classes"
    ignored = getattr(loss_func, "ignore_index", _IGNORED) if asked.ignore_index is None else asked.ignore_index
    if asked.task == "regression" or numbers or (kind == "regression" and asked.task is None):
        are_numbers = targets.is_floating_point() and outputs.numel() == targets.numel()
        if not numbers and asked.task is None and not are_numbers:
            raise _no_task(outputs, targets, f"{_name_of(loss_func)} is for numbers of one shape")
        if _without_last(outputs, targets)[0].numel() != targets.numel():
            asked_for = "the metrics are of numbers, which" if numbers else "numbers"
            raise _no_task(outputs, targets, f"{asked_for} need equal shapes")
        return Task("regression", scores="numbers")
    if scores == "classes":
        return _of_class_numbers(outputs, targets, asked, ignored)
    readings = _readings(kind, outputs, targets)
    if asked.task is not None:
        readings = [each for each in readings if _fits(each, asked.task)] or _asked_for(asked, outputs, targets)
    if asked.classes_dim is not None:
        dim = asked.classes_dim % outputs.ndim
        readings = [each for each in readings if each.dim in (dim, None)] or readings[:0]
    if len(readings) != 1:
        raise _no_task(outputs, targets, *(f"{each.words} (`{_how_to_ask(each, readings)}`)" for each in readings))
    task = dataclasses.replace(readings[0], scores="logits" if scores == "numbers" else scores, ignored=ignored)
    is_of_both = asked.task == "multiclass" or asked.average is not None  # of two classes, each counts
    return (
        dataclasses.replace(task, kind="multiclass")
        if (task.kind, task.classes) == ("binary", 2) and is_of_both
        else task
    )


def predicts_next(model: Any) -> bool | None:
    """Whether the loss of a model of `transformers` compares the outputs of a token with the next; None: unknown."""
    model = getattr(model, "get_base_model", lambda: model)()  # within adapters
    if getattr(model, "loss_type", None) in ("ForMaskedLM", "ForTokenClassification"):
        return False
    forward = getattr(inspect.unwrap(type(model).forward), "__code__", None)
    if "loss_function" not in getattr(forward, "co_names", ()):  # some causal models compute the loss of the same token
        return None
    return getattr(model.loss_function, "__name__", "") == "ForCausalLMLoss" or None


def is_known_loss(loss_func: Any) -> bool:
    """Whether a loss of torch tells what outputs and targets are."""
    return _of_loss(loss_func) is not None


def _of_loss(loss_func: Any) -> tuple[str, str] | None:
    while isinstance(loss_func, functools.partial):
        loss_func = loss_func.func
    kinds: list[Any] = [kind for kind in type(loss_func).__mro__ if kind in _LOSSES]
    if kinds and type(loss_func).forward is not kinds[0].forward:
        return None
    try:
        return _LOSSES.get(kinds[0] if kinds else loss_func)
    except TypeError:  # not hashable
        return None


def _name_of(loss_func: Any) -> str:
    return str(getattr(loss_func, "__name__", type(loss_func).__name__))


def _without_last(outputs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Both without a last dimension of 1, which one of them may have and the other not."""
    if outputs.ndim > 1 and outputs.shape[-1] == 1 and outputs.ndim != targets.ndim:
        return outputs.squeeze(-1), targets
    return outputs, targets


def _readings(kind: str | None, outputs: torch.Tensor, targets: torch.Tensor) -> list[Task]:
    """What outputs and targets of such shapes can be, for a loss of that kind."""
    has_dims, width = outputs.ndim > 1, outputs.shape[1] if outputs.ndim > 1 else 1
    if outputs.numel() != targets.numel() or outputs.shape[:1] != targets.shape[:1]:
        if targets.is_floating_point() or not has_dims:
            return []
        dims = [1] if kind == "multiclass" else sorted({1, outputs.ndim - 1})
        without = {dim: (*outputs.shape[:dim], *outputs.shape[dim + 1 :]) for dim in dims}
        return [_of_classes(outputs, dim) for dim in dims if without[dim] == tuple(targets.shape)]
    if kind == "multiclass":
        is_one_hot = width > 1 and outputs.shape == targets.shape  # or has shares of classes
        is_one_score = has_dims and width == 1 and not targets.is_floating_point()
        return [_of_classes(outputs, 1)] if is_one_hot or is_one_score else []
    if width == 1 or outputs.numel() == len(outputs):
        return [Task("binary")]
    if outputs.ndim == 2:
        of_classes = [_of_classes(outputs, 1)] if kind is None and targets.is_floating_point() else []
        return [Task("labels", width, 1), *of_classes]
    # Maps have their labels first; of sequences, they may be last.
    last = [Task("labels", outputs.shape[2], 2)] if outputs.ndim == 3 else []
    return [Task("binary"), Task("labels", width, 1), *last]


def _of_classes(outputs: torch.Tensor, dim: int) -> Task:
    classes = outputs.shape[dim]
    return Task("binary", classes, dim) if classes == 2 else Task("multiclass", classes, dim)


def _fits(reading: Task, task: str) -> bool:
    return reading.kind == task or (task == "multiclass" and reading.dim is not None and reading.classes == 2)


def _asked_for(asked: Asked, outputs: torch.Tensor, targets: torch.Tensor) -> list[Task]:
    """The reading that the user asks for, if shapes allow it although the loss does not suggest it."""
    is_same = outputs.shape == targets.shape
    dim = 1 if asked.classes_dim is None else asked.classes_dim % outputs.ndim
    if asked.task == "binary" and outputs.numel() == targets.numel():
        return [Task("binary")]
    if asked.task in ("labels", "multiclass") and is_same and outputs.ndim > dim:
        return [Task(asked.task, outputs.shape[dim], dim)]
    return []


def _of_class_numbers(outputs: torch.Tensor, targets: torch.Tensor, asked: Asked, ignored: int) -> Task:
    """The task of predictions that are whole numbers already."""
    if outputs.numel() != targets.numel():
        raise _no_task(outputs, targets, "class numbers need one target each")
    is_binary = asked.task == "binary" or (asked.task is None and outputs.dtype is torch.bool)
    return Task("binary" if is_binary else "multiclass", 1, None, "classes", ignored)


def _how_to_ask(reading: Task, readings: list[Task]) -> str:
    others = [each for each in readings if each is not reading]
    if not any(each.kind == reading.kind for each in others):
        return f"task={reading.kind!r}"
    of_others = "" if all(each.kind == reading.kind for each in others) else f"task={reading.kind!r}, "
    return f"{of_others}classes_dim={reading.dim}"


def _no_task(outputs: Any, targets: Any, *reasons: str) -> HookOutputError:
    what = f"The outputs are {described(outputs)}, and the targets {described(targets)}: "
    if len(reasons) > 1:
        return HookOutputError(f"{what}{' or '.join(reasons)}. Say which to MetricsCallback.")
    why = reasons[0] if reasons else "no task has such shapes with this loss"
    return HookOutputError(
        f"{what}{why}. For classes, give a score for each and whole numbers, or one score and 0 or 1; for numbers, "
        "equal shapes. `task`, `classes_dim`, `predictions` and `targets` of MetricsCallback say what they are."
    )
