"""What a page shows of the predictions of an evaluation, collected on the device and read once at its end."""

from __future__ import annotations

import base64
import copy
import dataclasses
import importlib.util
import io
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from pytorch_accelerated.callbacks import Asked, Task, is_known_loss, kind_of_task
from pytorch_accelerated.errors import HookOutputError

_MAX_CLASSES = 1000  # counts of more would take too much memory
_MAX_SHOWN_CLASSES = 30  # of a matrix, and of the table by class
_MAX_SCATTERED = 1000
_MAX_INPUT_ELEMENTS = 1_000_000  # of one sample; larger ones are not kept
_MAX_SHOWN_VALUES = 64
_MAX_SIDE = 128  # pixels of a picture: a dozen of them add some hundred kilobytes to a page
_MIN_SIDE = 4
_UNCLEAR = (
    "Classes and worst predictions are left out: shapes and the loss function do not tell what outputs and targets "
    "are. A MetricsCallback of the run may say it, by `task` or `classes_dim`, or an override of "
    "`get_predictions_and_targets`."
)
_NEXT = (
    "Classes are left out: the model computes its loss itself, and does not tell whether targets are those of the same "
    "tokens or of the next ones. For the same ones, a MetricsCallback of the run may say `targets='labels'`; an "
    "override of `get_predictions_and_targets` may give the next ones."
)
_UNSURE = (
    " left out: all scores are between 0 and 1, so they can be logits or probabilities, and the loss function does not "
    "tell. A MetricsCallback of the run may say it: `scores='logits'` or `scores='probabilities'`."
)


# Some samples, by column: "loss", "position" in the evaluation (-1 if unknown), "inputs" if they are kept; with classes
# or labels "truth" and "prediction", and "confidence" or "is_right"; with numbers "true_numbers" and "numbers".
Rows = dict[str, torch.Tensor]


def _worst(rows: Rows, number: int) -> Rows:
    """The `number` samples with the highest loss, the highest first. NaN is the highest of all."""
    places = rows["loss"].topk(min(number, len(rows["loss"]))).indices
    return {name: column[places] for name, column in rows.items()}


def _joined(parts: Sequence[Rows]) -> Rows:
    """The samples of all parts, without columns of different shapes."""
    shapes = [{name: column.shape[1:] for name, column in rows.items()} for rows in parts]
    common = [name for name, shape in shapes[0].items() if all(other.get(name) == shape for other in shapes)]
    return {name: torch.cat([rows[name] for rows in parts]) for name in common}


@dataclasses.dataclass
class PredictionsOfEvaluation:
    """Collects from the batches of one evaluation: counts of classes or labels, and the samples with the highest loss.

    Nothing is read from the device before `on_host`, and memory is bounded, however long the evaluation is. The loss
    function, shapes and dtypes tell what outputs and targets are, as for metrics by name; what has two readings is left
    out. With a loss function of the user's own, numbers that are all 0 or 1 are classes, and scores that are all from 0
    to 1 may be logits or probabilities: that is decided at the end, by all of them.

    Args:
        num_samples: how many samples to keep.
        loss_func: of the trainer, by which samples are ranked.
        asked: what the user says of outputs and targets.
        predicts_next: whether the outputs of a token predict the target of the next one; None if it is unknown.

    Attributes:
        task: what outputs and targets are.
        counts: of classes, rows are those that are true; or of labels, [labels, 2, 2].
        rows: the samples with the highest loss.
        scatter: two rows of values: what is true, and what is predicted.
        has_fractions: whether a target was neither 0 nor 1, where that decides.
        is_outside: whether a score was below 0 or above 1, where that decides.
        is_unclear: whether no reading fits, or more than one.
    """

    num_samples: int
    loss_func: Any = None
    asked: Asked = dataclasses.field(default_factory=Asked)
    predicts_next: bool | None = False
    task: Task | None = None
    counts: torch.Tensor | None = None
    rows: Rows = dataclasses.field(default_factory=dict)
    scatter: torch.Tensor | None = None
    has_fractions: torch.Tensor | None = None
    is_outside: torch.Tensor | None = None
    is_unclear: bool = False

    def add(self, outputs: Any, targets: Any, inputs: Any, start: int | None = None) -> None:
        """Collect from a batch.

        Args:
            outputs: of the model, on the device.
            targets: on the device.
            inputs: a tensor with one row for each sample, or anything else.
            start: the position of the first sample in the whole evaluation, if it is known.
        """
        if not isinstance(outputs, torch.Tensor) or not isinstance(targets, torch.Tensor) or not outputs.ndim:
            return
        outputs = outputs.detach()
        if self.predicts_next and outputs.ndim == 3 and outputs.shape[:2] == targets.shape:
            outputs, targets = outputs[:, :-1], targets[:, 1:]
        if not outputs.is_floating_point() or len(outputs) != len(targets) or not len(outputs):
            return
        is_open = self._may_be_numbers(outputs, targets)
        try:
            self.task = self.task or kind_of_task(self.loss_func, outputs, targets, self.asked)
        except HookOutputError:
            self.is_unclear = True
            if not is_open:
                return
            self.task = Task("regression", scores="numbers")
        if is_open:
            is_number = (targets != 0) & (targets != 1) & (targets.is_floating_point() | (targets != self.task.ignored))
            self.has_fractions = is_number.any() | (self.has_fractions or False)
        if self.task.scores == "unsure":
            self.is_outside = ((outputs < 0) | (outputs > 1)).any() | (self.is_outside or False)
        rows = {} if self.task.kind == "regression" else self._classified(self.task, outputs.float(), targets)
        if is_open or self.task.kind == "regression":
            rows |= self._estimated(*(each.reshape(len(each), -1).float() for each in (outputs, targets)))
        if self.num_samples and rows:
            losses, counts = self._losses(outputs, targets), rows.pop("counts", None)
            rows["loss"] = losses if counts is None else torch.where(counts, losses, -torch.inf)
            if isinstance(inputs, torch.Tensor) and inputs.ndim > 1 and len(inputs) == len(outputs):
                rows |= {"inputs": inputs} if inputs[0].numel() <= _MAX_INPUT_ELEMENTS else {}
            positions = torch.arange(len(outputs), device=outputs.device)
            rows["position"] = torch.full_like(positions, -1) if start is None else positions + start
            worst = _worst(rows, self.num_samples)
            if self.rows and worst["loss"].shape[1:] == self.rows["loss"].shape[1:]:
                worst = _worst(_joined([self.rows, worst]), self.num_samples)
            self.rows = worst

    def on_host(self) -> PredictionsOfEvaluation:
        """A copy in host memory, which ranks can exchange. Waits for the device."""
        names = ("counts", "scatter", "has_fractions", "is_outside")
        parts: dict[str, Any] = {name: None if (part := getattr(self, name)) is None else part.cpu() for name in names}
        rows = {name: column.cpu() for name, column in self.rows.items()}
        return dataclasses.replace(self, loss_func=None, rows=rows, **parts)

    def _may_be_numbers(self, outputs: torch.Tensor, targets: torch.Tensor) -> bool:
        """Whether the loss leaves open if these are numbers or classes."""
        is_open = self.asked.task is None and not is_known_loss(self.loss_func)
        return is_open and targets.numel() == outputs.numel()

    def _classified(self, task: Task, outputs: torch.Tensor, targets: torch.Tensor) -> Rows:
        scores, truth = task.compared(outputs, targets)
        classes = task.classes if task.kind == "multiclass" else 2
        counts = (truth != task.ignored) & (truth >= 0) & (truth < classes)
        prediction = task.classes_of(scores)
        if task.kind == "multiclass":
            confidence = (scores if task.scores == "probabilities" else scores.softmax(1)).amax(1)
        else:
            chance = scores if task.scores == "probabilities" else scores.sigmoid()
            confidence = torch.maximum(chance, 1 - chance)
        self._count(task, torch.where(counts, truth, 0), prediction, counts)
        if task.kind == "labels" and len(truth) == len(outputs):
            return {"truth": truth, "prediction": prediction, "is_right": (truth == prediction).all(1)}
        if len(truth) != len(outputs):  # of the places of a map
            return {}
        counts = counts if task.kind == "multiclass" else truth != task.ignored  # others may be numbers
        return {"truth": truth, "prediction": prediction, "confidence": confidence, "counts": counts}

    def _count(self, task: Task, truth: torch.Tensor, prediction: torch.Tensor, counts: torch.Tensor) -> None:
        classes = task.classes if task.kind == "multiclass" else 2
        if classes > _MAX_CLASSES:
            return
        groups = task.classes if task.kind == "labels" else 1
        if self.counts is None:
            self.counts = torch.zeros(groups, classes, classes, dtype=torch.long, device=truth.device)
        group = torch.arange(groups, device=truth.device).expand(truth.shape) if groups > 1 else torch.zeros_like(truth)
        self.counts.index_put_((group, truth, prediction), counts.long(), accumulate=True)

    def _estimated(self, outputs: torch.Tensor, targets: torch.Tensor) -> Rows:
        before = outputs.new_empty(2, 0) if self.scatter is None else self.scatter
        if before.shape[1] < _MAX_SCATTERED:
            pairs = torch.stack([targets.reshape(-1), outputs.reshape(-1)])
            self.scatter = torch.cat([before, pairs[:, : _MAX_SCATTERED - before.shape[1]]], dim=1)
        return {"true_numbers": targets, "numbers": outputs}

    def _losses(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """The loss of each sample, [n]: of the loss function without its mean, of batches of one, or the usual one."""
        for losses_of in (_without_mean, _one_by_one, _usual):
            try:
                losses = losses_of(self.loss_func, outputs, targets)
            except Exception:  # it takes something else, such as the batch
                continue
            if isinstance(losses, torch.Tensor) and losses.ndim and len(losses) == len(outputs):
                return losses.detach().reshape(len(outputs), -1).float().mean(1).to(outputs.device)
        return torch.zeros(len(outputs), device=outputs.device)


def _without_mean(loss_func: Any, outputs: torch.Tensor, targets: torch.Tensor) -> Any:
    """What a loss of torch returns without its mean."""
    if isinstance(loss_func, nn.Module) and hasattr(loss_func, "reduction"):
        one: Any = copy.copy(loss_func)
        one.reduction = "none"
        return one(outputs, targets)
    return loss_func(outputs, targets, reduction="none")


def _one_by_one(loss_func: Any, outputs: torch.Tensor, targets: torch.Tensor) -> Any:
    rows = zip(torch.split(outputs, 1), torch.split(targets, 1), strict=True)
    return torch.stack([torch.as_tensor(loss_func(*row)).detach().reshape(()) for row in rows])


def _usual(loss_func: Any, outputs: torch.Tensor, targets: torch.Tensor) -> Any:
    """The cross entropy of classes, or the squared error."""
    if not targets.is_floating_point() and outputs.ndim > targets.ndim and outputs.shape[1] > 1:
        return nn.functional.cross_entropy(outputs, targets.long(), reduction="none")
    return (outputs.reshape(len(outputs), -1) - targets.reshape(len(outputs), -1)).square()


def describe(
    per_rank: Sequence[PredictionsOfEvaluation],
    class_names: Sequence[str] | None,
    of: str,
    index_of: Callable[[int], int | None],
    usual_names: Sequence[str] | None = None,
) -> dict[str, Any]:
    """What a page shows of the predictions of an evaluation.

    These are `of`, `notes` on what is left out, and `classes`, `scatter` and `samples` or None.

    Args:
        per_rank: what each rank has collected.
        class_names: names by class; None for numbers.
        of: what the predictions are from, in words.
        index_of: the index in the dataset of the sample at a position of the evaluation; None if it is unknown.
        usual_names: those that count without `class_names`, if there are as many as classes.
    """
    is_open, has_numbers = _any(each.has_fractions for each in per_rank)
    is_unsure, is_outside = _any(each.is_outside for each in per_rank)
    task = next((each.task for each in per_rank if each.task is not None), Task("regression"))
    is_unsure = is_unsure and not is_outside and not has_numbers
    notes = []
    if task.dim == 2 and per_rank[0].predicts_next is None:
        notes = [_NEXT]
    elif any(each.is_unclear for each in per_rank) and not has_numbers:
        notes = [_UNCLEAR]
    elif is_unsure and (task.dim is None or task.kind == "labels"):  # divided by a threshold
        notes = ["Classes and worst predictions are" + _UNSURE]
    if notes:
        per_rank, task = [PredictionsOfEvaluation(0)], Task("regression")
    elif is_unsure:
        confident = [each.rows.pop("confidence", None) for each in per_rank]
        notes = ["The confidence of predictions is" + _UNSURE] * any(part is not None for part in confident)
    has_classes = task.kind != "regression" and not has_numbers
    counts = [each.counts for each in per_rank if each.counts is not None and not has_numbers]
    number = 2 if task.kind == "binary" else task.classes
    if has_classes and class_names is not None and len(class_names) != number:
        notes.append(
            f"`class_names` has {len(class_names)} names, and there are {number} classes, so they have numbers here."
        )
    names = usual_names if class_names is None else class_names
    names = names if names is not None and len(names) == number else None
    if number > _MAX_CLASSES:
        notes.append(f"Classes are left out: there are {number}, and a page shows at most {_MAX_CLASSES}.")
    if has_classes and per_rank[0].num_samples and not any(each.rows for each in per_rank):
        notes.append("Worst predictions are left out: a sample has many targets, such as of its pixels or tokens.")
    has_one_size = len({each.shape for each in counts}) == 1
    total = torch.stack(counts).sum(dim=0) if has_one_size else None
    rows = [each.rows for each in per_rank if each.rows]
    scattered = [each.scatter for each in per_rank if each.scatter is not None and (has_numbers or not is_open)]
    return {
        "of": of,
        "classes": None if total is None or not total.sum() else _describe_counts(total, names),
        "scatter": _describe_scatter(scattered),
        "samples": _describe_rows(rows, per_rank[0].num_samples, names, index_of, has_numbers=has_numbers),
        "notes": notes,
    }


def _any(parts: Iterable[torch.Tensor | None]) -> tuple[bool, bool]:
    """Whether there is a part, and whether one is true."""
    known = [bool(part) for part in parts if part is not None]
    return bool(known), any(known)


def _describe_counts(counts: torch.Tensor, class_names: Sequence[str] | None) -> dict[str, Any]:
    """The matrix of counts (rows: truth) if it is small, and a table by class or by label."""
    has_labels = len(counts) > 1
    matrix = counts[0]
    names = [_name(index, class_names) for index in range(len(counts) if has_labels else len(matrix))]
    if has_labels:
        columns = (counts[:, 1, 1].tolist(), counts[:, 1].sum(1).tolist(), counts[:, :, 1].sum(1).tolist())
    else:
        columns = (matrix.diagonal().tolist(), matrix.sum(dim=1).tolist(), matrix.sum(dim=0).tolist())
    table = [
        {
            "name": name,
            "precision": _ratio(right, predicted),
            "recall": _ratio(right, support),
            "f1": _ratio(2 * right, support + predicted),
            "support": support,
        }
        for name, right, support, predicted in zip(names, *columns, strict=True)
        if support or predicted
    ]
    is_large = len(names) > _MAX_SHOWN_CLASSES
    if is_large:
        table = sorted(table, key=lambda row: row["f1"] or 0.0)[:_MAX_SHOWN_CLASSES]
    return {
        "names": names if not is_large else [],
        "num_classes": len(names),
        "matrix": None if is_large or has_labels else matrix.tolist(),
        "table": table,
        "is_shortened": is_large,
        "correct": int(counts.diagonal(dim1=1, dim2=2).sum()),
        "total": int(counts.sum()),
        **({"word": "label"} if has_labels else {}),
    }


def _describe_scatter(parts: Sequence[torch.Tensor]) -> dict[str, Any] | None:
    if not parts:
        return None
    pairs = torch.cat([part[:, : -(-_MAX_SCATTERED // len(parts))] for part in parts], dim=1).double()
    truth, prediction = pairs[:, pairs.isfinite().all(dim=0)].tolist()
    return {"truth": truth, "prediction": prediction}


def _describe_rows(
    parts: Sequence[Rows],
    num_samples: int,
    class_names: Sequence[str] | None,
    index_of: Callable[[int], int | None],
    *,
    has_numbers: bool,
) -> dict[str, Any] | None:
    if not parts or len({frozenset((name, column.shape[1:]) for name, column in rows.items()) for rows in parts}) > 1:
        return None
    worst = _worst(_joined(parts), num_samples)
    columns = ("true_numbers", "numbers") if has_numbers or "truth" not in worst else ("truth", "prediction")
    described = []
    for place, loss in enumerate(worst["loss"].tolist()):
        if loss == -torch.inf:
            continue  # not counted in the loss
        truth, prediction = (worst[name][place] for name in columns)
        position = worst["position"][place]
        row: dict[str, Any] = {
            "loss": loss,
            "index": None if position < 0 else index_of(int(position)),
            "target": _in_words(truth, class_names),
            "prediction": _in_words(prediction, class_names),
            "is_right": None if columns[0] == "true_numbers" else bool((truth == prediction).all()),
            "confidence": float(worst["confidence"][place]) if "confidence" in worst and not has_numbers else None,
        }
        if "inputs" in worst:
            inputs = worst["inputs"][place]
            row |= {"image": as_data_uri(inputs)} if looks_like_image(inputs) else {"values": _numbers(inputs)}
        described.append(row)
    return {"rows": described, "what": "The samples with the highest loss, the highest first."}


def _in_words(value: torch.Tensor, class_names: Sequence[str] | None) -> str:
    """A class, the labels that a sample has, or numbers."""
    if value.is_floating_point():
        return _numbers(value)
    if not value.ndim:
        return _name(int(value), class_names)
    return ", ".join(_name(index, class_names) for index in value.nonzero()[:, 0].tolist()) or "none"


def _numbers(tensor: torch.Tensor) -> str:
    values = tensor.reshape(-1)[: _MAX_SHOWN_VALUES + 1].tolist()
    shown = ", ".join(f"{value:.4g}" for value in values[:_MAX_SHOWN_VALUES])
    return f"{shown}, …" if len(values) > _MAX_SHOWN_VALUES else shown


def _ratio(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def _name(index: int, class_names: Sequence[str] | None) -> str:
    return str(class_names[index]) if class_names is not None and 0 <= index < len(class_names) else str(index)


def looks_like_image(row: torch.Tensor) -> bool:
    """Whether an input can be shown as a picture: channels (1, 3 or 4), height and width; or height and width alone.

    Without Pillow, none can.
    """
    is_channels_first = row.ndim == 3 and row.shape[0] in (1, 3, 4)
    is_one = (is_channels_first or row.ndim == 2) and min(row.shape[-2:]) >= _MIN_SIDE
    return is_one and importlib.util.find_spec("PIL") is not None


def as_data_uri(row: torch.Tensor) -> str:
    """A picture of an input for which `looks_like_image` holds, as the ``src`` of an HTML image.

    Values are stretched to the whole range from black to white, because inputs are usually normalised.

    Args:
        row: on the CPU; channels, height and width, or height and width.
    """
    from PIL import Image

    pixels = torch.nan_to_num(row.detach().to(torch.float32), nan=0.0, posinf=0.0, neginf=0.0)
    if row.ndim == 3:
        pixels = pixels[:3].movedim(0, 2).squeeze(2)
    low, high = pixels.min(), pixels.max()
    raw_bytes = ((pixels - low) * (255 / (high - low).clamp(min=1e-12))).round().to(torch.uint8)
    picture, file = Image.fromarray(raw_bytes.numpy()), io.BytesIO()
    picture.thumbnail((_MAX_SIDE, _MAX_SIDE))
    picture.save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode("ascii")
