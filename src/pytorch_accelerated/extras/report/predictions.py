"""What a page shows of the predictions of an evaluation, collected on the device and read once at its end."""

from __future__ import annotations

import base64
import dataclasses
import importlib.util
import io
from collections.abc import Callable, Sequence
from typing import Any

import torch

_MAX_CLASSES = 1000  # counts of more would take too much memory
_MAX_SHOWN_CLASSES = 30  # of a matrix, and of the table by class
_MAX_SCATTERED = 1000
_MAX_INPUT_ELEMENTS = 1_000_000  # of one sample; larger ones are not kept
_MAX_SHOWN_VALUES = 64
_MAX_SIDE = 128  # pixels of a picture: a dozen of them add some hundred kilobytes to a page
_MIN_SIDE = 4


# Some samples, by column: "loss", "position" in the evaluation (-1 if unknown), "truth", "prediction", with classes
# "confidence", and "inputs" if they are kept.
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
    """Collects from the batches of one evaluation: counts of classes, and the samples with the highest loss.

    Nothing is read from the device before `on_host`, and memory is bounded, however long the evaluation is. Outputs of
    shape (samples, classes) with whole numbers as targets are logits, or logarithms of probabilities; their loss is the
    cross entropy. Targets of the shape of the outputs and of a floating type are those of a regression; their loss is
    the mean squared error of a sample. Anything else is left out.

    Args:
        num_samples: how many samples to keep.
        is_binary: whether outputs are logits of one class against another, with one for each sample.

    Attributes:
        counts: of classes; rows are those that are true.
        rows: the samples with the highest loss.
        scatter: two rows of values: what is true, and what is predicted.
    """

    num_samples: int
    is_binary: bool
    counts: torch.Tensor | None = None
    rows: Rows = dataclasses.field(default_factory=dict)
    scatter: torch.Tensor | None = None

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
        if self.is_binary and outputs.numel() == len(outputs) and targets.numel() == len(outputs):
            logits = outputs.reshape(-1).float()
            outputs, targets = torch.stack([torch.zeros_like(logits), logits], dim=1), targets.reshape(-1).long()
        is_integer = not targets.is_floating_point() and not targets.is_complex()
        if is_integer and targets.ndim == 1 and outputs.ndim == 2 and outputs.shape[1] > 1:
            rows = self._classified(outputs.float(), targets.long())
        elif targets.is_floating_point() and targets.numel() == outputs.numel() and outputs.ndim <= 2:
            rows = self._estimated(outputs.reshape(len(outputs), -1).float(), targets.reshape(len(outputs), -1).float())
        else:
            return
        if self.num_samples:
            if isinstance(inputs, torch.Tensor) and inputs.ndim > 1 and len(inputs) == len(outputs):
                rows |= {"inputs": inputs} if inputs[0].numel() <= _MAX_INPUT_ELEMENTS else {}
            positions = torch.arange(len(outputs), device=outputs.device)
            rows["position"] = torch.full_like(positions, -1) if start is None else positions + start
            worst = _worst(rows, self.num_samples)
            before = self.rows
            if before and before["truth"].shape[1:] == worst["truth"].shape[1:]:
                worst = _worst(_joined([before, worst]), self.num_samples)
            self.rows = worst

    def on_host(self) -> PredictionsOfEvaluation:
        """A copy in host memory, which ranks can exchange. Waits for the device."""
        counts, scatter = (None if part is None else part.cpu() for part in (self.counts, self.scatter))
        rows = {name: column.cpu() for name, column in self.rows.items()}
        return dataclasses.replace(self, counts=counts, rows=rows, scatter=scatter)

    def _classified(self, logits: torch.Tensor, targets: torch.Tensor) -> Rows:
        num_classes = logits.shape[1]
        is_counted = (targets >= 0) & (targets < num_classes)  # others are to be ignored, such as -100
        truth = torch.where(is_counted, targets, 0)
        log_probabilities = logits.log_softmax(dim=1)
        confidence, prediction = log_probabilities.max(dim=1)
        loss = -log_probabilities.gather(1, truth[:, None])[:, 0]
        if self.counts is None and num_classes <= _MAX_CLASSES:
            self.counts = torch.zeros(num_classes, num_classes, dtype=torch.long, device=logits.device)
        if self.counts is not None and len(self.counts) == num_classes:
            self.counts.index_put_((truth, prediction), is_counted.long(), accumulate=True)
        loss = torch.where(is_counted, loss, -torch.inf)
        return {"loss": loss, "truth": targets, "prediction": prediction, "confidence": confidence.exp()}

    def _estimated(self, outputs: torch.Tensor, targets: torch.Tensor) -> Rows:
        before = outputs.new_empty(2, 0) if self.scatter is None else self.scatter
        if before.shape[1] < _MAX_SCATTERED:
            pairs = torch.stack([targets.reshape(-1), outputs.reshape(-1)])
            self.scatter = torch.cat([before, pairs[:, : _MAX_SCATTERED - before.shape[1]]], dim=1)
        return {"loss": (outputs - targets).square().mean(dim=1), "truth": targets, "prediction": outputs}


def describe(
    per_rank: Sequence[PredictionsOfEvaluation],
    class_names: Sequence[str] | None,
    of: str,
    index_of: Callable[[int], int | None],
) -> dict[str, Any]:
    """What a page shows of the predictions of an evaluation: `of`, and `classes`, `scatter` and `samples` or None.

    Args:
        per_rank: what each rank has collected.
        class_names: names by class; None for numbers.
        of: what the predictions are from, in words.
        index_of: the index in the dataset of the sample at a position of the evaluation; None if it is unknown.
    """
    counts = [each.counts for each in per_rank if each.counts is not None]
    has_one_size = len({len(each) for each in counts}) == 1
    total = torch.stack(counts).sum(dim=0) if has_one_size else None
    rows = [each.rows for each in per_rank if each.rows]
    return {
        "of": of,
        "classes": None if total is None or not total.sum() else _describe_counts(total, class_names),
        "scatter": _describe_scatter([each.scatter for each in per_rank if each.scatter is not None]),
        "samples": _describe_rows(rows, per_rank[0].num_samples, class_names, index_of),
    }


def _describe_counts(counts: torch.Tensor, class_names: Sequence[str] | None) -> dict[str, Any]:
    """The matrix of counts (rows: truth) if it is small, and a table by class."""
    names = [_name(index, class_names) for index in range(len(counts))]
    columns = (counts.diagonal().tolist(), counts.sum(dim=1).tolist(), counts.sum(dim=0).tolist())
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
    is_large = len(counts) > _MAX_SHOWN_CLASSES
    if is_large:
        table = sorted(table, key=lambda row: row["f1"] or 0.0)[:_MAX_SHOWN_CLASSES]
    return {
        "names": names if not is_large else [],
        "num_classes": len(counts),
        "matrix": None if is_large else counts.tolist(),
        "table": table,
        "is_shortened": is_large,
        "correct": int(counts.trace()),
        "total": int(counts.sum()),
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
) -> dict[str, Any] | None:
    if not parts or len({rows["truth"].shape[1:] for rows in parts}) > 1:
        return None
    worst = _worst(_joined(parts), num_samples)
    has_classes = "confidence" in worst
    described = []
    for place, loss in enumerate(worst["loss"].tolist()):
        if loss == -torch.inf:
            continue  # not counted in the loss
        truth, prediction, position = (worst[name][place] for name in ("truth", "prediction", "position"))
        row: dict[str, Any] = {
            "loss": loss,
            "index": None if position < 0 else index_of(int(position)),
            "target": _name(int(truth), class_names) if has_classes else _numbers(truth),
            "prediction": _name(int(prediction), class_names) if has_classes else _numbers(prediction),
            "is_right": bool(truth == prediction) if has_classes else None,
            "confidence": float(worst["confidence"][place]) if has_classes else None,
        }
        if "inputs" in worst:
            inputs = worst["inputs"][place]
            row |= {"image": as_data_uri(inputs)} if looks_like_image(inputs) else {"values": _numbers(inputs)}
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
    octets = ((pixels - low) * (255 / (high - low).clamp(min=1e-12))).round().to(torch.uint8)
    picture, file = Image.fromarray(octets.numpy()), io.BytesIO()
    picture.thumbnail((_MAX_SIDE, _MAX_SIDE))
    picture.save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode("ascii")
