"""What the model sees: the samples of the first batch of a run as pictures, masks, texts and rows."""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import html
import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from pytorch_accelerated.callbacks import MetricsCallback, TrainerCallback, kind_of_task
from pytorch_accelerated.errors import ConfigurationError, HookOutputError
from pytorch_accelerated.extras.looking.preflight import shape_in_words
from pytorch_accelerated.extras.looking.rehearsal import rehearsal, taking_part
from pytorch_accelerated.facts.trees import leaves_by_path, parts_of, tensors_in
from pytorch_accelerated.record import new_figure
from pytorch_accelerated.record.text import aligned, format_numbers, table_of_rows

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from pytorch_accelerated.loop.callback import Trainer

_KINDS = ("image", "mask", "text", "row")
_CHANNELS = (1, 3, 4)
_MOST_LETTERS = 200
_PANELS_IN_A_ROW = 6


@dataclasses.dataclass(frozen=True)
class Wishes:
    """What the user says of a batch.

    Attributes:
        kinds: "image", "mask", "text" or "row" by the place in the batch, such as ``[0]`` or ``['pixels']``.
        class_names: of the targets that are class numbers.
        decode: makes a text of the numbers of its tokens.
        samples: how many to show.
    """

    kinds: Mapping[str, str] = dataclasses.field(default_factory=dict)
    class_names: Sequence[str] | None = None
    decode: Callable[[list[int]], str] | None = None
    samples: int = 12

    def __post_init__(self) -> None:
        for place, kind in self.kinds.items():
            if kind not in _KINDS:
                raise ConfigurationError(f"`kinds` has {kind!r} for {place!r}: choose one of {', '.join(_KINDS)}.")


class Shown:
    """Samples as the model sees them: the last line of a notebook's cell shows them; elsewhere `print` or `plot` them.

    Attributes:
        batch: the whole batch of this rank, on its device.
        inputs: the tensors that the model got for it.
        notes: what was not recognised, and what to say of it.
    """

    def __init__(self, seen: _First, more: Mapping[str, Any], wishes: Wishes) -> None:
        self.batch, self.inputs, self.notes = seen.batch, seen.inputs, list[str]()
        self._pictures: dict[str, Any] = {}
        self._masks: dict[str, Any] = {}
        self._words: dict[str, list[str]] = {}
        leaves = leaves_by_path(self.batch, parts=_parts).items()
        columns: dict[str, Any] = {name or "batch": leaf for name, leaf in leaves}
        known = {id(each) for each in columns.values()}
        changed = [each for each in self.inputs if id(each) not in known]  # in a hook, as by mixup
        columns |= {**{f"model input {number}": each for number, each in enumerate(changed)}, **more}
        unknown = [place for place in wishes.kinds if place not in columns]
        if unknown:
            raise ConfigurationError(f"`kinds` names {unknown[0]!r}, but the batch has {', '.join(columns)}.")
        tensors = {len(each) for each in columns.values() if isinstance(each, torch.Tensor) and each.ndim}
        lengths = tensors | {len(each) for each in columns.values() if isinstance(each, (list, tuple))}
        self._count = min(*lengths, wishes.samples) if len(lengths) == 1 else 0
        kinds = _kinds_of(columns, wishes) if self._count else {}
        numbered = [name for name, each in columns.items() if _is_whole(each) and each.ndim == 1 and name not in more]
        for name, column in columns.items():
            if name not in kinds:
                self._note(name, column)
                continue
            rows = column[: self._count]
            rows = rows.detach().cpu() if isinstance(rows, torch.Tensor) else rows
            if kinds[name] == "image":
                self._pictures[name] = _as_picture(rows)
            elif kinds[name] == "mask":
                self._masks[name] = rows.reshape(len(rows), *rows.shape[-2:]).numpy()
            elif kinds[name] == "text":
                texts = [wishes.decode(row.tolist()) for row in rows] if wishes.decode and _is_whole(rows) else rows
                self._words[name] = [str(text)[:_MOST_LETTERS] for text in texts]
            else:
                names = wishes.class_names if name in more or numbered == [name] else None
                self._words[name] = [_in_words(row, names) for row in rows]

    def _note(self, name: str, column: Any) -> None:
        if isinstance(column, torch.Tensor):
            what = f"{shape_in_words(tuple(column.shape))}, {str(column.dtype).removeprefix('torch.')}"
            ask = f'; `kinds={{"{name}": ...}}` says which of {", ".join(_KINDS)} it is' if self._count else ""
            self.notes.append(f"{name}: {what}{ask}")
        else:
            self.notes.append(f"{name}: {type(column).__name__}")

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


def show_batch(trainer: Trainer, arguments: Mapping[str, Any], wishes: Wishes) -> Shown:
    """The first batch of ``trainer.train(**arguments)``; see `Trainer.show_batch`."""
    given = {**arguments, "nonfinite_policy": None, "reset_run_history": True}
    return Shown(_first_batch(trainer, lambda: trainer.train(**given)), {}, wishes)


def show_predictions(trainer: Trainer, dataset: Any, arguments: Mapping[str, Any], wishes: Wishes) -> Shown:
    """The first batch of ``trainer.evaluate(dataset, **arguments)``; see `Trainer.show_predictions`."""
    seen = _first_batch(trainer, lambda: trainer.evaluate(dataset, **arguments))
    outputs: Any = seen.outputs.get("logits") if isinstance(seen.outputs, Mapping) else seen.outputs
    targets = seen.batch.get("labels") if isinstance(seen.batch, Mapping) else seen.batch[-1]
    notes = []
    try:
        task = kind_of_task(trainer.loss_func, outputs, targets)
        if task.kind in ("binary", "multiclass") and task.dim is not None:
            outputs = outputs.argmax(task.dim)
    except HookOutputError as error:
        notes = [f"The outputs are shown as they are. {error}"]
    shown = Shown(seen, {"prediction": outputs}, wishes)
    shown.notes += notes
    return shown


class _Seen(Exception):
    """Ends a rehearsal."""


class _First(NamedTuple):
    """The first batch, what the model got, and what it returned."""

    batch: Any
    inputs: list[torch.Tensor]
    outputs: Any


class _EndsAtFirst(TrainerCallback):
    """Notes the first batch, and ends the rehearsal."""

    seen: tuple[Any, Any] = (None, None)

    def on_train_step_end(self, trainer: Trainer, *, batch: Any, batch_output: Any, **kwargs: Any) -> None:
        self.seen = batch, batch_output.get("model_outputs")
        raise _Seen

    on_eval_step_end = on_train_step_end


def _first_batch(trainer: Trainer, run: Callable[[], Any]) -> _First:
    end, inputs = _EndsAtFirst(), list[torch.Tensor]()

    def note_inputs(model: Any, args: Any, kwargs: Any) -> None:
        inputs.extend([] if inputs else tensors_in((args, kwargs)))

    # Callbacks may change a batch, so they take part; metrics are of no use here, and would print what they measure.
    callbacks = [each for each in taking_part(trainer.callback_handler) if not isinstance(each, MetricsCallback)]
    with rehearsal(trainer, [*callbacks, end]):
        asked = trainer.run_context.asked
        asked.given = dataclasses.replace(asked.given, compile_model=False)  # compiling for one batch takes too long
        hook = trainer.get_model().register_forward_pre_hook(note_inputs, with_kwargs=True)
        try:
            with contextlib.suppress(_Seen):
                run()
        finally:
            hook.remove()
        batch, outputs = end.seen
    return _First(batch, inputs, outputs)


def _parts(data: Any) -> Sequence[Any] | None:
    """As `parts_of`, but a list of texts is a leaf."""
    parts = parts_of(data)
    return None if parts and isinstance(data, (list, tuple)) and all(isinstance(each, str) for each in data) else parts


def _is_whole(column: Any) -> bool:
    is_tensor = isinstance(column, torch.Tensor) and not column.is_complex()
    return is_tensor and not column.is_floating_point()


def _kinds_of(columns: Mapping[str, Any], wishes: Wishes) -> dict[str, str]:
    """The kind of each column that has one reading, or that the user says."""
    tensors = {name: each for name, each in columns.items() if isinstance(each, torch.Tensor) and not each.is_complex()}
    images = {name: each for name, each in tensors.items() if each.ndim == 4 and _is_image(each)}
    sizes = {size for each in images.values() for size in (each.shape[2:], each.shape[1:3])}
    of_tokens = [name for name, each in tensors.items() if _is_whole(each) and each.ndim == 2]
    kinds = {name: "text" for name, each in columns.items() if isinstance(each, (list, tuple))}
    for name, each in tensors.items():
        if name in images:
            kinds[name] = "image"
        elif each.ndim == 3 and _is_whole(each) and each.shape[1:] in sizes:
            kinds[name] = "mask"
        elif each.ndim in (1, 2):
            is_text = wishes.decode is not None and of_tokens == [name]
            kinds[name] = "text" if is_text else "row"
    return {**kinds, **wishes.kinds}


def _is_image(column: torch.Tensor) -> bool:
    """Whether exactly one of the dimensions that can have the channels has a number of them."""
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
