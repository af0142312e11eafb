"""What a page shows of the predictions of an evaluation, collected on the device and read once at its end."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch

from pytorch_accelerated.progress.images import as_data_uri, looks_like_image

_MAX_CLASSES = 1000  # counts of more would take too much memory
_MAX_SHOWN_CLASSES = 30  # of a matrix, and of the table by class
_MAX_SCATTERED = 1000
_MAX_INPUT_ELEMENTS = 1_000_000  # of one sample; larger ones are not kept
_MAX_SHOWN_VALUES = 64


@dataclasses.dataclass
class Rows:
    """Some samples: their loss, position in the evaluation (-1 if unknown), truth, prediction, confidence and inputs.

    The confidence is NaN without classes, and inputs are None if they are not kept.
    """

    loss: torch.Tensor
    position: torch.Tensor
    truth: torch.Tensor
    prediction: torch.Tensor
    confidence: torch.Tensor
    inputs: torch.Tensor | None

    def worst(self, number: int) -> Rows:
        """The `number` samples with the highest loss, the highest first. NaN is the highest of all."""
        places = self.loss.topk(min(number, len(self.loss))).indices
        parts = (getattr(self, field.name) for field in dataclasses.fields(self))
        return Rows(*(None if part is None else part[places] for part in parts))  # type: ignore[arg-type]

    def joined(self, others: Sequence[Rows]) -> Rows:
        """These samples and `others`; without inputs where those have different shapes."""
        every = (self, *others)
        columns = {field.name: [getattr(rows, field.name) for rows in every] for field in dataclasses.fields(self)}
        inputs = columns.pop("inputs")
        has_inputs = all(part is not None and part.shape[1:] == inputs[0].shape[1:] for part in inputs)
        parts = {name: torch.cat(column) for name, column in columns.items()}
        return Rows(**parts, inputs=torch.cat(inputs) if has_inputs else None)

    def cpu(self) -> Rows:
        """Copies in host memory."""
        parts = (getattr(self, field.name) for field in dataclasses.fields(self))
        return Rows(*(None if part is None else part.cpu() for part in parts))  # type: ignore[arg-type]


@dataclasses.dataclass
class Collected:
    """What one rank has collected, in host memory. Ranks exchange it."""

    counts: torch.Tensor | None
    rows: Rows | None
    truth: torch.Tensor | None
    prediction: torch.Tensor | None


class PredictionsOfEvaluation:
    """Collects from the batches of one evaluation: counts of classes, and the samples with the highest loss.

    Nothing is read from the device before `on_host`, and memory is bounded, however long the evaluation is. Outputs of
    shape (samples, classes) with whole numbers as targets are logits, or logarithms of probabilities; their loss is the
    cross entropy. Targets of the shape of the outputs and of a floating type are those of a regression; their loss is
    the mean squared error of a sample. Anything else is left out.

    Args:
        num_samples: how many samples to keep.
        is_binary: whether outputs are logits of one class against another, with one for each sample.
    """

    def __init__(self, num_samples: int, *, is_binary: bool) -> None:
        self._num_samples = num_samples
        self._is_binary = is_binary
        self._counts: torch.Tensor | None = None
        self._num_classes = 0
        self._rows: Rows | None = None
        self._truth: list[torch.Tensor] = []
        self._prediction: list[torch.Tensor] = []
        self._scattered = 0

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
        if not outputs.is_floating_point() or len(outputs) != len(targets) or not len(outputs):
            return
        if self._is_binary and outputs.numel() == len(outputs) and targets.numel() == len(outputs):
            logits = outputs.reshape(-1).float()
            outputs, targets = torch.stack([torch.zeros_like(logits), logits], dim=1), targets.reshape(-1).long()
        is_integer = not targets.is_floating_point() and not targets.is_complex()
        if is_integer and targets.ndim == 1 and outputs.ndim == 2 and outputs.shape[1] > 1:
            rows = self._classified(outputs.float(), targets.long())
        elif targets.is_floating_point() and targets.numel() == outputs.numel() and outputs.ndim <= 2:
            rows = self._estimated(outputs.reshape(len(outputs), -1).float(), targets.reshape(len(outputs), -1).float())
        else:
            return
        if self._num_samples:
            rows.inputs = self._kept_inputs(inputs, len(outputs))
            if start is not None:
                rows.position = torch.arange(start, start + len(outputs), device=outputs.device)
            rows = rows.worst(self._num_samples)
            same_kind = self._rows is not None and self._rows.truth.shape[1:] == rows.truth.shape[1:]
            self._rows = self._rows.joined([rows]).worst(self._num_samples) if same_kind and self._rows else rows

    def on_host(self) -> Collected:
        """What was collected. Waits for the device."""
        counts = None if self._counts is None else self._counts[:-1].reshape(self._num_classes, -1).cpu()
        truth, prediction = (torch.cat(parts).cpu() if parts else None for parts in (self._truth, self._prediction))
        return Collected(counts, None if self._rows is None else self._rows.cpu(), truth, prediction)

    def _classified(self, logits: torch.Tensor, targets: torch.Tensor) -> Rows:
        num_classes = logits.shape[1]
        is_counted = (targets >= 0) & (targets < num_classes)  # others are to be ignored, such as -100
        truth = torch.where(is_counted, targets, 0)
        log_probabilities = logits.log_softmax(dim=1)
        confidence, prediction = log_probabilities.max(dim=1)
        loss = -log_probabilities.gather(1, truth[:, None])[:, 0]
        if num_classes <= _MAX_CLASSES and self._num_classes in (0, num_classes):
            if self._counts is None:
                self._num_classes = num_classes
                self._counts = torch.zeros(num_classes**2 + 1, dtype=torch.long, device=logits.device)
            places = torch.where(is_counted, truth * num_classes + prediction, num_classes**2)
            self._counts.index_put_((places,), torch.ones_like(places), accumulate=True)
        loss = torch.where(is_counted, loss, -torch.inf)
        return Rows(loss, _unknown(loss), targets, prediction, confidence.exp(), None)

    def _estimated(self, outputs: torch.Tensor, targets: torch.Tensor) -> Rows:
        missing = _MAX_SCATTERED - self._scattered
        if missing > 0:
            part = targets.reshape(-1)[:missing].clone()
            self._truth.append(part)
            self._prediction.append(outputs.reshape(-1)[:missing].clone())
            self._scattered += len(part)
        loss = (outputs - targets).square().mean(dim=1)
        return Rows(loss, _unknown(loss), targets, outputs, torch.full_like(loss, torch.nan), None)

    @staticmethod
    def _kept_inputs(inputs: Any, samples: int) -> torch.Tensor | None:
        is_kept = isinstance(inputs, torch.Tensor) and inputs.ndim > 1 and len(inputs) == samples
        return inputs if is_kept and inputs[0].numel() <= _MAX_INPUT_ELEMENTS else None


def _unknown(loss: torch.Tensor) -> torch.Tensor:
    return torch.full(loss.shape, -1, device=loss.device)


def describe(
    everyones: Sequence[Collected],
    num_samples: int,
    class_names: Sequence[str] | None,
    of: str,
    index_of: Callable[[int], int | None],
) -> dict[str, Any]:
    """What a page shows of the predictions of an evaluation: `of`, and `classes`, `scatter` and `samples` or None.

    Args:
        everyones: what each rank has collected.
        num_samples: how many samples to show.
        class_names: names by class; None for numbers.
        of: what the predictions are from, in words.
        index_of: the index in the dataset of the sample at a position of the evaluation; None if it is unknown.
    """
    counts = [each.counts for each in everyones if each.counts is not None]
    has_one_size = len({len(each) for each in counts}) == 1
    total = torch.stack(counts).sum(dim=0) if has_one_size else None
    return {
        "of": of,
        "classes": None if total is None or not total.sum() else _describe_counts(total, class_names),
        "scatter": _describe_scatter(everyones),
        "samples": _describe_rows([each.rows for each in everyones if each.rows], num_samples, class_names, index_of),
    }


def _describe_counts(counts: torch.Tensor, class_names: Sequence[str] | None) -> dict[str, Any]:
    """The matrix of counts (rows: truth) if it is small, and a table by class."""
    names = [_name(index, class_names) for index in range(len(counts))]
    right, support, predicted = counts.diagonal().tolist(), counts.sum(dim=1).tolist(), counts.sum(dim=0).tolist()
    table = []
    for index, name in enumerate(names):
        row = {
            "name": name,
            "precision": _ratio(right[index], predicted[index]),
            "recall": _ratio(right[index], support[index]),
            "f1": _ratio(2 * right[index], support[index] + predicted[index]),
            "support": support[index],
        }
        if support[index] or predicted[index]:
            table.append(row)
    is_large = len(counts) > _MAX_SHOWN_CLASSES
    if is_large:
        table = sorted(table, key=lambda row: row["f1"] or 0.0)[:_MAX_SHOWN_CLASSES]
    return {
        "names": names if not is_large else [],
        "num_classes": len(counts),
        "matrix": None if is_large else counts.tolist(),
        "table": table,
        "is_shortened": is_large,
        "correct": sum(right),
        "total": sum(support),
    }


def _describe_scatter(everyones: Sequence[Collected]) -> dict[str, Any] | None:
    parts = [
        (each.truth, each.prediction) for each in everyones if each.truth is not None and each.prediction is not None
    ]
    if not parts:
        return None
    each = -(-_MAX_SCATTERED // len(parts))
    truth, prediction = (torch.cat([pair[side][:each] for pair in parts]).double() for side in (0, 1))
    is_finite = truth.isfinite() & prediction.isfinite()
    return {"truth": truth[is_finite].tolist(), "prediction": prediction[is_finite].tolist()}


def _describe_rows(
    parts: Sequence[Rows],
    num_samples: int,
    class_names: Sequence[str] | None,
    index_of: Callable[[int], int | None],
) -> dict[str, Any] | None:
    if not parts or len({rows.truth.shape[1:] for rows in parts}) > 1:
        return None
    worst = parts[0].joined(parts[1:]).worst(num_samples)
    has_classes = worst.truth.ndim == 1
    described = []
    for place, loss in enumerate(worst.loss.tolist()):
        if loss == -torch.inf:
            continue  # not counted in the loss
        truth, prediction, position = worst.truth[place], worst.prediction[place], int(worst.position[place])
        row: dict[str, Any] = {
            "loss": loss,
            "index": None if position < 0 else index_of(position),
            "target": _name(int(truth), class_names) if has_classes else _numbers(truth),
            "prediction": _name(int(prediction), class_names) if has_classes else _numbers(prediction),
            "is_right": bool(truth == prediction) if has_classes else None,
            "confidence": float(worst.confidence[place]) if has_classes else None,
        }
        if worst.inputs is not None:
            inputs = worst.inputs[place]
            is_image = looks_like_image(inputs)
            row |= {"image": as_data_uri(inputs)} if is_image else {"values": _numbers(inputs)}
        described.append(row)
    kind = "cross entropy" if has_classes else "squared error"
    return {"rows": described, "what": f"The samples with the highest {kind}, the highest first."}


def _numbers(tensor: torch.Tensor) -> str:
    values = tensor.reshape(-1)[: _MAX_SHOWN_VALUES + 1].tolist()
    shown = ", ".join(f"{value:.4g}" for value in values[:_MAX_SHOWN_VALUES])
    return f"{shown}, …" if len(values) > _MAX_SHOWN_VALUES else shown


def _ratio(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def _name(index: int, class_names: Sequence[str] | None) -> str:
    return str(class_names[index]) if class_names is not None and 0 <= index < len(class_names) else str(index)
