"""A rehearsal of a run: one update, one evaluation batch, one save and reload; then everything is restored."""

from __future__ import annotations

import dataclasses
import math
import reprlib
import shutil
import tempfile
import textwrap
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from pytorch_accelerated.callbacks import SaveTrainingStateCallback, TrainerCallback
from pytorch_accelerated.data import SharedRows, find_shared_rows
from pytorch_accelerated.errors import CheckpointError, UnknownMetricError
from pytorch_accelerated.extras.looking.rehearsal import QuietLimit, rehearsal, taking_part
from pytorch_accelerated.facts.trees import leaves_by_path, tensors_in
from pytorch_accelerated.record import widest_float
from pytorch_accelerated.record.text import aligned, format_bytes, format_numbers
from pytorch_accelerated.states import save_run
from pytorch_accelerated.states.disk import is_folder, resolved

if TYPE_CHECKING:
    from pytorch_accelerated.loop.callback import Trainer


class EntryFacts(NamedTuple):
    """One tensor or other value of a batch.

    Attributes:
        name: its place in the batch, such as ``[0]`` or ``['labels']``; empty if the batch is a single tensor.
        shape: the shape of a tensor, else None.
        kind: the dtype of a tensor, else the name of the class.
        value: the range of a tensor, or the value, as a short text.
        missing: the share of a tensor's entries that are NaN.
    """

    name: str
    shape: tuple[int, ...] | None
    kind: str
    value: str
    missing: float

    @property
    def cells(self) -> tuple[str, str, str, str]:
        """Name, type, shape, and values with the share of NaN, as texts."""
        missing = f" ({self.missing:.1%} NaN)" if self.missing else ""
        return self.name or "batch", self.kind, shape_in_words(self.shape), self.value + missing


class BatchFacts(NamedTuple):
    """What the first batch of this rank looks like.

    Attributes:
        entries: its tensors and other values.
    """

    entries: tuple[EntryFacts, ...]

    def __repr__(self) -> str:
        return "\n".join(aligned([entry.cells for entry in self.entries]))


def facts_of(batch: Any) -> BatchFacts:
    """The facts of a batch. Waits for the device."""
    return BatchFacts(tuple(_facts(path, leaf) for path, leaf in leaves_by_path(batch).items()))


def first_shape(data: Any) -> tuple[int, ...] | None:
    """The shape of the first tensor in nested containers; None if there is none."""
    return next((tuple(tensor.shape) for tensor in tensors_in(data)), None)


def _facts(name: str, value: Any) -> EntryFacts:
    if not isinstance(value, torch.Tensor):
        return EntryFacts(name, None, type(value).__name__, reprlib.repr(value), 0)
    kind = str(value.dtype).removeprefix("torch.")
    shape = tuple(value.shape)
    if value.numel() == 0 or value.is_complex():
        return EntryFacts(name, shape, kind, "", 0)
    wide = widest_float(value.device) if value.is_floating_point() else torch.int64
    numbers = value.detach().to(wide)
    is_missing = torch.isnan(numbers)
    known = numbers[~is_missing]
    return EntryFacts(name, shape, kind, _range(known), is_missing.float().mean().item())


def _range(numbers: torch.Tensor) -> str:
    if numbers.numel() == 0:
        return ""
    if not numbers.is_floating_point():
        return f"{numbers.min().item()} to {numbers.max().item()}"
    text = f"{numbers.min().item():.4g} to {numbers.max().item():.4g}"
    mean = numbers.mean().item()
    return f"{text}, mean {mean:.4g}" if math.isfinite(mean) else text


def shape_in_words(shape: tuple[int, ...] | None) -> str:
    """For example "8 x 3"; empty if there is none."""
    return "" if shape is None else " x ".join(map(str, shape)) or "one number"


@dataclasses.dataclass(frozen=True, repr=False)
class PreflightReport:
    """The results of `Trainer.preflight`; ``print(report)`` shows them.

    Attributes:
        metric_names: the metrics that the run will record.
        seconds: the duration of the whole rehearsal.
        state_size_bytes: the size of one training state.
        free_bytes: free space on the disk for training states, or for temporary files if none are saved.
        rehearsed: the callbacks that took part.
        left_out: the callbacks that would have printed or written something.
        batch: what the first training batch of this rank looks like.
        shared: the rows that training and evaluation share; None without an evaluation set, or for streams.
        doubt: why the outputs of this batch look as if they were not what the loss function takes; empty if they don't.
    """

    metric_names: tuple[str, ...]
    seconds: float
    state_size_bytes: int
    free_bytes: int
    rehearsed: tuple[str, ...]
    left_out: tuple[str, ...]
    batch: BatchFacts = BatchFacts(())
    shared: SharedRows | None = None
    doubt: str = ""

    def __repr__(self) -> str:
        facts = {
            "metrics": ", ".join(self.metric_names),
            "training state": f"{format_bytes(self.state_size_bytes)}, of {format_bytes(self.free_bytes)} free",
            "callbacks": ", ".join(self.rehearsed) or "none",
            "left out": ", ".join(self.left_out) or "none",
        }
        if self.shared is not None:
            number, (of_training, of_evaluation) = len(self.shared.rows), self.shared.compared
            facts["shared rows"] = f"{number} of {of_evaluation} evaluation rows are among {of_training} training rows"
            facts["shared rows"] += f": {format_numbers(self.shared.rows)}" if number else ""
        if self.doubt:
            facts["outputs"] = self.doubt
        lines = aligned([(f"  {name}:", value) for name, value in facts.items()])
        batch = textwrap.indent(str(self.batch), "    ")
        remark = (
            "  Everything that the trainer holds is as before; what callbacks or datasets keep elsewhere may not be."
        )
        head = f"Preflight passed in {self.seconds:.1f} s: one update, one evaluated batch, one save and reload."
        return "\n".join([head, *lines, "  first batch:", batch, remark])


def rehearse(trainer: Trainer, arguments: dict[str, Any]) -> PreflightReport:
    """Rehearse ``trainer.train(**arguments)``. Must be called by all ranks.

    Args:
        trainer: the trainer.
        arguments: the arguments of `train`.

    Raises:
        Any error that the run would have raised; CheckpointError also if the disk cannot hold what will be saved, and
            UnknownMetricError if a callback watches a metric that nothing records.
    """
    started = time.perf_counter()
    ranks = trainer.run_context.parts.ranks
    callbacks = list(trainer.callback_handler)
    savers = [callback for callback in callbacks if isinstance(callback, SaveTrainingStateCallback)]
    places = [_existing_parent(saver.folder) for saver in savers] or [Path(tempfile.gettempdir())]
    one_update = _StopsAfterOneUpdate()
    scratch = Path(ranks.do_on_first(lambda: tempfile.mkdtemp(prefix=".preflight-", dir=places[0])))
    try:
        with rehearsal(trainer, [*taking_part(callbacks), QuietLimit(1), one_update], place=places[0]):
            # Going back to a training state would need callbacks that are left out.
            trainer.train(**{**arguments, "resume_from": None, "nonfinite_policy": None, "reset_run_history": True})
            metric_names, batch = tuple(trainer.run_history.get_metric_names()), one_update.batch
            doubt = one_update.doubt
            loaders = trainer.run_context.parts.loaders
            pair = None if loaders.eval is None else (loaders.train.source, loaders.eval.source)
            shared = ranks.do_on_first(lambda: pair and find_shared_rows(*pair))
            save_run(trainer.run_context, scratch / "after", {})
            trainer.run_context.control.states.load(scratch / "after", restores_position=False)
        size_bytes = sum(file.stat().st_size for file in (scratch / "after").iterdir())
        ranks.wait()
    finally:
        if ranks.is_first:
            shutil.rmtree(scratch, ignore_errors=True)
    _check_watched_metrics(callbacks, metric_names)
    free_bytes = shutil.disk_usage(places[0]).free
    if savers and free_bytes < 2 * size_bytes:
        raise CheckpointError(
            f"{savers[0].folder} needs room for two training states of {format_bytes(size_bytes)}, but only "
            f"{format_bytes(free_bytes)} are free on its disk. Free some space, or save elsewhere."
        )
    rehearsed = taking_part(callbacks)
    return PreflightReport(
        metric_names=metric_names,
        seconds=time.perf_counter() - started,
        state_size_bytes=size_bytes,
        free_bytes=free_bytes,
        rehearsed=tuple(type(each).__name__ for each in rehearsed),
        left_out=tuple(type(each).__name__ for each in callbacks if each not in rehearsed),
        batch=batch,
        shared=shared,
        doubt=doubt,
    )


class _StopsAfterOneUpdate(TrainerCallback):
    """Ends the run after one update, when everything (such as the schedule) has been created for the whole run.

    Attributes:
        batch: what the batch of that update looks like.
        doubt: why its outputs look as if they were not what the loss function takes.
    """

    batch = BatchFacts(())
    doubt = ""

    def on_training_run_start(self, trainer: Trainer, **kwargs: Any) -> None:
        run = trainer.run_context
        run.asked.settings = dataclasses.replace(
            run.asked.settings, max_num_train_steps=1, max_samples=None, max_tokens=None
        )

    def on_train_step_end(self, trainer: Trainer, *, batch: Any, batch_output: Any, **kwargs: Any) -> None:
        if not self.batch.entries:
            self.batch = facts_of(batch)
            self.doubt = _doubt(trainer.loss_func, batch_output["model_outputs"])


def _doubt(loss_func: Any, outputs: Any) -> str:
    if not isinstance(outputs, torch.Tensor) or not outputs.is_floating_point() or not outputs.numel():
        return ""
    low, high = (float(each) for each in outputs.detach().aminmax())
    if isinstance(loss_func, nn.CrossEntropyLoss) and outputs.ndim > 1 and low >= 0:
        sums = outputs.detach().float().sum(1)
        if torch.allclose(sums, torch.ones_like(sums), atol=1e-2):
            return "add up to 1, and CrossEntropyLoss takes scores: leave out the softmax at the end of the model"
    step = outputs.grad_fn
    while step is not None and step.name().startswith(("Squeeze", "View", "Unsqueeze")):
        step = step.next_functions[0][0]
    # Scores of a new model may all be in [0, 1], too.
    if isinstance(loss_func, nn.BCEWithLogitsLoss) and step is not None and step.name().startswith("Sigmoid"):
        return "end with a sigmoid, and BCEWithLogitsLoss takes scores: leave it out"
    if isinstance(loss_func, nn.NLLLoss) and high > 0:
        return "are above 0, and NLLLoss takes logarithms of probabilities: use CrossEntropyLoss for scores"
    return ""


def _check_watched_metrics(callbacks: list[TrainerCallback], metric_names: tuple[str, ...]) -> None:
    for callback in callbacks:
        name = getattr(callback, "watch_metric", "intermediate_")
        is_used = not isinstance(callback, SaveTrainingStateCallback) or callback.retention.best is not None
        if is_used and not name.startswith("intermediate_") and name.removeprefix("ema_model_") not in metric_names:
            raise UnknownMetricError(
                f"{type(callback).__name__} watches {name!r}, which nothing records. The run records "
                f"{', '.join(map(repr, metric_names))}. Watch one of these, or record {name!r}."
            )


def _existing_parent(path: str | Path) -> Path:
    """The innermost existing folder among `path` and its parents."""
    path = resolved(path)
    return next(folder for folder in (path, *path.parents) if is_folder(folder))
