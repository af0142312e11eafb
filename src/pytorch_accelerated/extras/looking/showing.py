"""What the model sees: the samples of the first batch of a run as pictures, masks, texts and rows."""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import functools
import html
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from pytorch_accelerated.callbacks import LimitEvalStepsCallback, MetricsCallback, TrainerCallback, kind_of_task
from pytorch_accelerated.errors import ConfigurationError, HookOutputError
from pytorch_accelerated.extras.looking.preflight import shape_in_words
from pytorch_accelerated.extras.looking.rehearsal import rehearsal, taking_part
from pytorch_accelerated.facts import described
from pytorch_accelerated.facts.trees import leaves_by_path, parts_of, tensors_in
from pytorch_accelerated.record import new_figure
from pytorch_accelerated.record.text import aligned, format_numbers, table_of_rows

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from pytorch_accelerated.loop.callback import Trainer

_WISHES: dict[str, Any] = {"kinds": {}, "class_names": None, "decode": None, "samples": 12}
_KINDS = ("image", "mask", "text", "row")
_CHANNELS = (1, 3, 4)
_MOST_LETTERS = 200
_PANELS_IN_A_ROW = 6


class Shown:
    """Samples as the model sees them: the last line of a notebook's cell shows them; elsewhere `print` or `plot` them.

    Attributes:
        batch: the whole batch of this rank, on its device.
        inputs: the tensors that the model got for it.
        notes: what was not recognised, and what to say of it.
    """

    def __init__(
        self, batch: Any, inputs: list[torch.Tensor], predictions: Mapping[str, Any], wishes: Mapping[str, Any]
    ) -> None:
        given = {**_WISHES, **{name: wish for name, wish in wishes.items() if wish is not None}}
        kinds, class_names, decode, samples = (given[name] for name in _WISHES)
        self.batch, self.inputs, self.notes = batch, inputs, list[str]()
        leaves = leaves_by_path(self.batch, parts=_parts).items()
        columns: dict[str, Any] = {name or "batch": leaf for name, leaf in leaves}
        known = {id(each) for each in columns.values()}
        changed = [each for each in self.inputs if id(each) not in known]  # in a hook, as by mixup
        columns |= {**{f"model input {number}": each for number, each in enumerate(changed)}, **predictions}
        for place, said in kinds.items():
            if place not in columns or said not in _KINDS:
                raise ConfigurationError(
                    f"`kinds` says that {place} is {said!r}. The batch has {', '.join(columns)}, and a part of it is "
                    f"one of {', '.join(_KINDS)}."
                )
        lengths = {len(each) for each in columns.values() if isinstance(each, list) or getattr(each, "shape", None)}
        self._count = min(*lengths, samples) if len(lengths) == 1 else 0
        sizes = {size for each in columns.values() if _is_image(each) for size in (each.shape[2:], each.shape[1:3])}
        whole = {name: each.ndim for name, each in columns.items() if _is_whole(each)}
        of_tokens = [name for name, dimensions in whole.items() if dimensions == 2]
        of_classes = [name for name, dimensions in whole.items() if dimensions == 1 and name not in predictions]
        self._pictures: dict[str, Any] = {}
        self._masks: dict[str, Any] = {}
        self._words: dict[str, list[str]] = {}
        for name, column in columns.items():
            is_text = isinstance(column, list) or (decode is not None and of_tokens == [name])
            known_kind = "text" if is_text else _kind_of(column, sizes)
            kind = kinds.get(name) or known_kind if self._count else None
            rows: Any = column[: self._count] if kind else []
            rows = rows.detach().cpu() if isinstance(rows, torch.Tensor) else rows
            if kind == "image":
                self._pictures[name] = _as_picture(rows)
            elif kind == "mask":
                self._masks[name] = rows.reshape(len(rows), *rows.shape[-2:]).numpy()
            elif kind == "text":
                texts = map(decode, rows.tolist()) if decode is not None and _is_whole(rows) else rows
                self._words[name] = [str(text)[:_MOST_LETTERS] for text in texts]
            elif kind == "row":
                names = class_names if name in predictions or of_classes == [name] else None
                self._words[name] = [_in_words(row, names) for row in rows]
            else:
                ask = f'; `kinds={{"{name}": ...}}` says which of {", ".join(_KINDS)} it is' if self._count else ""
                self.notes.append(f"{name}: {described(column)}{ask}")

    def _rows(self) -> list[dict[str, str]]:
        arrays = {**self._pictures, **self._masks}
        shapes = {name: shape_in_words(each.shape[1:]) for name, each in arrays.items()}
        return [{**shapes, **{name: each[i] for name, each in self._words.items()}} for i in range(self._count)]

    def __repr__(self) -> str:
        rows = self._rows()
        return "\n".join([*aligned([list(row) for row in [*rows[:1], *(row.values() for row in rows)]]), *self.notes])

    def _repr_html_(self) -> str:
        content = table_of_rows(self._rows())
        if self._pictures:
            png = base64.b64encode(self.plot()._repr_png_()).decode("ascii")  # type: ignore[attr-defined]
            content = f"<img style='max-width:100%' src='data:image/png;base64,{png}'>"
        return content + "".join(f"<div>{html.escape(note)}</div>" for note in self.notes)

    def plot(self, path: str | os.PathLike[str] | None = None) -> Figure:
        """A matplotlib figure: pictures with their masks and words, or the table of `print` without any picture.

        Args:
            path: also save it there; the suffix determines the format.

        Raises:
            MissingDependencyError: if matplotlib is not installed.
        """
        panels = [(picture, mask) for picture in self._pictures for mask in self._masks or [None]]
        if panels:
            figure = self._figure(panels)
        else:
            lines = repr(self).splitlines()
            size = 0.1 * max(map(len, lines), default=1), 0.2 * len(lines) + 0.2
            figure = new_figure(*size, needed_by="`plot`")
            figure.text(0.01, 0.98, "\n".join(lines), family="monospace", va="top")
        if path is not None:
            figure.savefig(path, dpi=150)
        return figure

    def _figure(self, panels: list[tuple[str, str | None]]) -> Figure:
        columns = len(panels) * max(1, _PANELS_IN_A_ROW // len(panels))
        lines = -(-self._count * len(panels) // columns)
        figure = new_figure(1.9 * columns, (1.9 + 0.2 * len(self._words)) * lines, needed_by="`plot`")
        classes = [each for mask in self._masks.values() for each in (mask.min(), mask.max())] or [0]
        limits = {"vmin": min(classes), "vmax": max(*classes, min(classes) + 1)}
        for index in range(self._count):
            for number, (picture, mask) in enumerate(panels):
                axes = figure.add_subplot(lines, columns, index * len(panels) + number + 1)
                axes.imshow(self._pictures[picture][index], cmap="gray", vmin=0, vmax=1)
                words = [f"{name}: {column[index]}"[:40] for name, column in self._words.items() if not number]
                if mask is not None:
                    pixels = self._masks[mask][index]
                    share = 0.6 * (pixels != 0)  # the background stays as it is
                    axes.imshow(pixels, cmap="turbo", alpha=share, interpolation="nearest", **limits)
                    words.append(mask)
                axes.set_title("\n".join(words), fontsize=8)
                axes.set_axis_off()
        return figure


def show_batch(trainer: Trainer, arguments: Mapping[str, Any]) -> Shown:
    """The first batch of a run; see `Trainer.show_batch`."""
    wishes, others = _divided(arguments)
    run = functools.partial(trainer.train, **{**others, "nonfinite_policy": None, "reset_run_history": True})
    batch, inputs, _ = _first_batch(trainer, run)
    return Shown(batch, inputs, {}, wishes)


def show_predictions(trainer: Trainer, arguments: Mapping[str, Any]) -> Shown:
    """The first batch of an evaluation, with predictions; see `Trainer.show_predictions`."""
    wishes, others = _divided(arguments)
    batch, inputs, found = _first_batch(trainer, functools.partial(trainer.evaluate, **others))
    outputs: Any = found.get("logits") if isinstance(found, Mapping) else found
    targets = batch.get("labels") if isinstance(batch, Mapping) else None
    if isinstance(batch, (list, tuple)) and len(batch) > 1:
        targets = batch[1]
    notes = []
    try:
        task = kind_of_task(trainer.loss_func, outputs, targets)
        if task.kind in ("binary", "multiclass") and task.dim is not None:
            outputs = outputs.argmax(task.dim)
        elif task.kind in ("binary", "labels") and task.scores in ("logits", "probabilities"):
            outputs = task.classes_of(outputs)
            if task.kind == "binary" and outputs.ndim > 1:
                outputs = outputs.squeeze(1)  # as class numbers, and masks, are
    except HookOutputError as error:
        notes = [f"The outputs are shown as they are. {error}"]
    shown = Shown(batch, inputs, {"prediction": outputs}, wishes)
    shown.notes += notes
    return shown


def _divided(arguments: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What is said of the batch, and the arguments of the run."""
    return [{name: each for name, each in arguments.items() if (name in _WISHES) is wanted} for wanted in (True, False)]


class _Seen(Exception):
    """Ends a rehearsal."""


class _EndsAtFirst(TrainerCallback):
    """Notes the first batch, and ends the rehearsal where all ranks are, also one that has no batch."""

    seen: tuple[Any, ...] = ()

    def on_train_step_end(self, trainer: Trainer, *, batch: Any, batch_output: Any, **kwargs: Any) -> None:
        self.seen = self.seen or (batch, batch_output.get("model_outputs"))

    on_eval_step_end = on_train_step_end

    def on_optimizer_step_start(self, trainer: Trainer, **kwargs: Any) -> None:
        raise _Seen


def _first_batch(trainer: Trainer, run: Callable[[], Any]) -> tuple[Any, list[torch.Tensor], Any]:
    """The first batch, what the model got, and what it returned."""
    end, inputs = _EndsAtFirst(), list[torch.Tensor]()

    def note_inputs(model: Any, args: Any, kwargs: Any) -> None:
        inputs.extend([] if inputs else tensors_in((args, kwargs)))

    # Callbacks may change a batch, so they take part; metrics are of no use here, and would print what they measure.
    callbacks = [each for each in taking_part(trainer.callback_handler) if not isinstance(each, MetricsCallback)]
    with rehearsal(trainer, [*callbacks, LimitEvalStepsCallback(1, limit_intermediate_only=False), end]):
        asked = trainer.run_context.asked
        asked.given = dataclasses.replace(asked.given, compile_model=False)  # compiling for one batch takes too long
        hook = trainer.get_model().register_forward_pre_hook(note_inputs, with_kwargs=True)
        try:
            with contextlib.suppress(_Seen):
                run()
        finally:
            hook.remove()
        batch, outputs = end.seen or (None, None)
    return batch, inputs, outputs


def _parts(data: Any) -> Sequence[Any] | None:
    """As `parts_of`, but a list of texts is a leaf."""
    return None if isinstance(data, list) and data and all(isinstance(each, str) for each in data) else parts_of(data)


def _is_whole(column: Any) -> bool:
    is_tensor = isinstance(column, torch.Tensor) and not column.is_complex()
    return is_tensor and not column.is_floating_point()


def _kind_of(column: Any, sizes: Collection[Any]) -> str | None:
    """The kind of a column, by shape and dtype, and by the `sizes` of pictures; None if it has no single reading."""
    if not isinstance(column, torch.Tensor) or column.is_complex():
        return None
    if _is_image(column):
        return "image"
    if column.ndim == 3 and _is_whole(column) and column.shape[1:] in sizes:
        return "mask"
    return "row" if column.ndim in (1, 2) else None


def _is_image(column: Any) -> bool:
    """Whether exactly one of the dimensions that can have the channels has a number of them."""
    if not isinstance(column, torch.Tensor) or column.ndim != 4:
        return False
    is_known = column.is_floating_point() or column.dtype == torch.uint8
    return is_known and (column.shape[1] in _CHANNELS) != (column.shape[3] in _CHANNELS)


def _as_picture(rows: torch.Tensor) -> Any:
    """Height, width and channels from 0 to 1; stretched over all samples if they are on another scale."""
    values = torch.nan_to_num(rows.float(), nan=0.0, posinf=0.0, neginf=0.0)
    if rows.dtype == torch.uint8:
        values = values / 255
    if values.ndim == 4 and values.shape[1] in _CHANNELS:
        values = values.movedim(1, 3)
    low, high = values.min(), values.max()
    if low < 0 or high > 1:
        values = (values - low) / (high - low).clamp(min=1e-12)
    return values.squeeze(-1).numpy() if values.ndim == 4 else values.numpy()


def _in_words(row: torch.Tensor, class_names: Sequence[str] | None) -> str:
    if not row.ndim and class_names is not None and _is_whole(row) and 0 <= int(row) < len(class_names):
        return str(class_names[int(row)])
    return format_numbers(row.reshape(-1).tolist())
