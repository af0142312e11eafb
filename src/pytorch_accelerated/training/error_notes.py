"""Notes on errors in a user's code: where in the run, with which batch, and the usual cause.

Python shows the notes of an exception below its message; its type and message are unchanged.
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from pytorch_accelerated.compat.python import add_note
from pytorch_accelerated.errors import PytorchAcceleratedError
from pytorch_accelerated.training.tracebacks import place_of, users_frame

_BEGINNING = "This happened in"
_logger = logging.getLogger("pytorch_accelerated")

_STAGES = {
    "calculate_train_batch_loss": "the forward pass or the loss of training",
    "calculate_eval_batch_loss": "the forward pass or the loss of an evaluation",
    "calculate_predict_batch_outputs": "the forward pass of a prediction or evaluation",
    "training_step": "the training step",
    "backward_step": "the backward pass",
    "optimizer_step": "the optimizer's step",
}
# The usual causes of torch's errors. The first match is used; the messages are those of torch 2.10 to 2.13.
_CAUSES = [
    (
        r"out of memory|DefaultCPUAllocator",
        "The batch is too large for the free memory. `split_on_oom=True` (`auto_find_batch_size` in "
        "TrainingArguments) computes batches in parts that fit, without changing the updates. So does a smaller batch "
        "size with more `gradient_accumulation_steps`.",
    ),
    (
        r"Target -?\d+ is out of bounds|smaller than num_classes|Assertion `t >= 0 && t < n_classes` failed",
        "A label is out of range: class labels go from 0 to the number of the model's outputs minus 1. Typical causes "
        "are labels that start at 1, and a last layer with too few outputs.",
    ),
    (
        r"index out of range in self",
        "An index into an embedding is out of range: it must be at least 0 and smaller than the embedding's number of "
        "rows. Tokens added to a tokenizer need a larger embedding.",
    ),
    (
        r"device-side assert",
        "An index is out of range: usually a label that is not from 0 to the number of outputs minus 1, or an input "
        "of an embedding. Run the same batch on the CPU (with CUDA_VISIBLE_DEVICES empty) to see the exact place.",
    ),
    (
        r"expected target dtype to be Long|expected scalar type Long but found|nll_loss.* not implemented for",
        "Labels that are class numbers must be int64: `labels.long()`. Floating-point targets for this loss are "
        "probabilities, one for each class.",
    ),
    (
        r"'indices' to have one of the following scalar types",
        "The input of an embedding must be whole numbers: `.long()`.",
    ),
    (
        r"can't be cast to the desired output type Long|Found dtype (Long|Int|Byte|Bool) but expected",
        "This loss needs floating-point targets: `targets.float()`.",
    ),
    (
        r"[Dd]ouble|torch\.float64",
        "A tensor is float64, NumPy's default, and the model is not: convert it in the dataset, "
        "with `.float()` or `astype('float32')`.",
    ),
    (
        r"must have the same dtype|should be the same|does not match weight dtype",
        "The input has a different dtype than the model's weights: convert it with `.float()`, or to the model's "
        "dtype.",
    ),
    (
        r"same device|expected device|Expected object of device type",
        "A tensor is on another device than the rest. Only the batch and the model are moved: create tensors in "
        "forward with `device=inputs.device`, register constants as buffers, and move a loss function that holds "
        "tensors (class weights) to `trainer.device`.",
    ),
    (
        r"mat1 and mat2 shapes cannot be multiplied|Given normalized_shape",
        "The last dimension of the input is not the number of features that the layer expects. Images may have to be "
        "flattened first.",
    ),
    (
        r"expected input.* to have \d+ channels",
        "The layer expects another number of channels than the input has. Images are (channels, height, width) here, "
        "and greyscale images have one channel.",
    ),
    (
        r"Expected more than 1 value per channel",
        "BatchNorm cannot train on a single sample, and the last batch may have only one: pass `drop_last=True` to "
        "the training "
        "loader.",
    ),
    (
        r"multi-target not supported",
        "The labels have one dimension too many, probably of size 1: `labels.squeeze(1)`.",
    ),
    (
        r"[Tt]arget size|must match the size of tensor|to match target batch_size",
        "Outputs and targets have different shapes. Compare them; often a `squeeze(1)`, `unsqueeze(1)` or `flatten` "
        "is missing.",
    ),
    (
        r"finished reduction in the prior iteration",
        "Some parameters got no gradient in the previous update. If that is intended, the model must be wrapped with "
        "`find_unused_parameters=True`.",
    ),
    (
        r"backward through the graph a second time",
        "A tensor of an earlier batch, such as a hidden state or a running loss, is used again with its graph. "
        "`.detach()` it.",
    ),
    (
        r"forward\(\).* (argument|arguments)\b",
        "The model's forward receives a dict batch as keyword arguments, and of other batches only the first item. "
        "This batch does not match the parameters of forward.",
    ),
]
_MOST_ITEMS = 8


def note_failure(error: Exception, *, hook: str, batch: Any, position: str, rank: int, ranks: int) -> None:
    """Add a note to an error that user code or torch raised while a batch was processed, unless it has one.

    Args:
        error: the error.
        hook: the hook that raised it.
        batch: the batch that the hook received.
        position: the position in the run, in words.
        rank: the number of this process.
        ranks: the number of processes.
    """
    if any(note.startswith(_BEGINNING) for note in getattr(error, "__notes__", ())):
        return
    where = f" on rank {rank} of {ranks}" if ranks > 1 else ""
    lines = [
        f"{_BEGINNING} {_STAGES.get(hook, hook)}{where}: {position}.",
        f"The batch: {described(batch)}.",
    ]
    message = f"{type(error).__name__}: {error}"
    cause = next((text for pattern, text in _CAUSES if re.search(pattern, message)), None)
    if cause is not None and not isinstance(error, PytorchAcceleratedError):  # our own errors explain themselves
        lines.append(f"The usual cause: {cause}")
    add_note(error, "\n".join(lines))


def add_place(error: BaseException, position: str) -> None:
    """Complete the note of an error that ends a run: where it happened if no hook did it, and the user's own frame.

    Args:
        error: the error.
        position: the position in the run, in words.
    """
    place, frame = place_of(error), users_frame(error)
    notes: list[str] = list(getattr(error, "__notes__", ()))
    noted = next((at for at, note in enumerate(notes) if note.startswith(_BEGINNING)), None)
    if noted is None and place is not None:
        noted = len(notes)
        notes.append(f"{_BEGINNING} {place}: {position}.")
    if noted is None:
        return
    if frame is not None:
        notes[noted] += f"\nYour code: {frame}"
    error.__notes__ = notes  # type: ignore[attr-defined, unused-ignore]


def add_module(error: BaseException, module: str) -> None:
    """Say in the note of an error in a backward pass to which module that part of the pass belongs."""
    notes: list[str] = getattr(error, "__notes__", [])
    for at, note in enumerate(notes):
        if note.startswith(f"{_BEGINNING} {_STAGES['backward_step']}"):
            notes[at] = f"{note}\nIt belongs to {module}."


def show_note(error: BaseException) -> None:
    """Log the notes of an error that ends a run if Python is too old (3.10) to show them below the message."""
    notes = getattr(error, "__notes__", ())
    if notes and sys.version_info < (3, 11):
        _logger.error("\n".join([f"{type(error).__name__}: {error}", *notes]))


def described(value: Any, depth: int = 0) -> str:
    """The shapes, types and devices of a batch's values, and the range of its integers, for people."""
    if isinstance(value, torch.Tensor):
        return _described_tensor(value)
    name = type(value).__name__
    if isinstance(value, Mapping) and depth < 3:
        return f"{name} with {_listed((f'{key!r}: {described(item, depth + 1)}' for key, item in value.items()))}"
    if isinstance(value, (tuple, list)) and depth < 3:
        return f"{name} of {len(value)} with {_listed(described(item, depth + 1) for item in value)}"
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    return name if shape is None else f"{name} of {dtype} {list(shape)}"


def _listed(texts: Iterable[str]) -> str:
    items = list(texts)
    more = f" and {len(items) - _MOST_ITEMS} more" if len(items) > _MOST_ITEMS else ""
    return f"({'; '.join(items[:_MOST_ITEMS])}{more})"


def _described_tensor(tensor: torch.Tensor) -> str:
    text = f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)} on {tensor.device}"
    is_whole = not (tensor.dtype.is_floating_point or tensor.dtype.is_complex or tensor.dtype is torch.bool)
    if is_whole and tensor.numel():
        try:
            low, high = torch.aminmax(tensor)
            text += f", values from {low.item()} to {high.item()}"
        except Exception:  # a device may be unusable after an error
            return text
    return text
