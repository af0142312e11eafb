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

from pytorch_accelerated.errors import PytorchAcceleratedError

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
# The commonest causes of torch's errors, whose messages are those of torch 2.10 to 2.13; "When it breaks" has more.
_CAUSES = {
    r"mat1 and mat2 shapes cannot be multiplied": "The first linear layer has another `in_features` than the last "
    "dimension of its input. `nn.Flatten()` in front of it makes rows of images; a single feature is [samples, 1].",
    r"out of memory|DefaultCPUAllocator": "The batch is too large for the free memory. Half of "
    "`per_device_batch_size` with twice the `gradient_accumulation_steps` makes the same updates.",
    r"Target -?\d+ is out of bounds|smaller than num_classes|t < n_classes|device-side assert": "A label is out of "
    "range: class labels go from 0 to the number of outputs minus 1. On a GPU it may also be an input of an embedding.",
    r"expected target dtype to be Long|expected scalar type Long but found|nll_loss.* not implemented for": "Labels "
    "that are class numbers must be int64: `labels.long()`.",
    r"can't be cast to the desired output type Long|Found dtype (Long|Int|Byte|Bool) but expected": "This loss needs "
    "floating-point targets: `targets.float()`.",
    r"multi-target not supported|Expected floating point type for target with class prob": "Class numbers are one for "
    "each row: `labels.squeeze(1)` of a column, `labels.argmax(1)` of one-hot rows.",
    r"Target size .* must be the same as input size": "The targets need the shape of the scores: "
    "`targets.float().unsqueeze(1)` makes a column, as a layer with one output does.",
    r"all elements of input should be between 0 and 1": "This loss takes probabilities: for the scores of a linear "
    "layer, use `nn.BCEWithLogitsLoss()`.",
    r"[Dd]ouble|torch\.float64": "A tensor is float64, NumPy's default, and the model is not: convert it in the "
    "dataset, with `.float()` or `astype('float32')`.",
    r"same dtype, but got (Byte|Char|Short|Int|Long)|Input type \((unsigned )?(char|int|long|short)": "The inputs are "
    "whole numbers: convert them in the dataset, with `.float()`, pictures with `.float() / 255`.",
    r"(loss|entropy)\w*\(\): argument 'input' \(position 1\) must be Tensor, not tuple": "The model returns a tuple, "
    "as `nn.LSTM` and `nn.GRU` do: return the scores alone, or give a loss function that takes the tuple.",
    r"Expected more than 1 value per channel": "A batch norm got one row, in a last short batch: "
    "`train_dataloader_kwargs={'drop_last': True}` leaves it out.",
    r"must be Tensor, not (tuple|list)|'(tuple|list)' object has no attribute": "A part of the batch is not a tensor, "
    "because its rows are text or other objects: turn them into numbers in the dataset; "
    "`np.unique(labels, return_inverse=True)[1]` makes class numbers of texts.",
    r"missing 1 required positional argument: 'closure'": "Optimizers such as LBFGS compute the loss several times a "
    "step: override `optimizer_step`, and call `self.optimizer.step(closure)` there, with a function that computes it "
    "again (docs/how_to/optimizers.md has one).",
    r"does not require grad|has no attribute 'backward'": "The loss depends on nothing that is trained. Return it "
    "without `.item()` or `.detach()`, and check that parameters of the model have `requires_grad=True`.",
    r"backward through the graph a second time": "A hook calls `backward()` itself, which the trainer does after it; "
    "or a tensor of an earlier batch is used again, which must be detached.",
    r"same device|expected device|Expected object of device type": "A tensor is on another device than the rest: "
    "create tensors in forward with `device=inputs.device`, and move a loss function with weights to `trainer.device`.",
}
_WITHOUT_GRADIENTS = ("calculate_eval_batch_loss", "calculate_predict_batch_outputs")
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
    if _has_note(error):
        return
    where = f" on rank {rank} of {ranks}" if ranks > 1 else ""
    lines = [f"{_BEGINNING} {_STAGES.get(hook, hook)}{where}: {position}."]
    message = f"{type(error).__name__}: {error}"
    cause = next((text for pattern, text in _CAUSES.items() if re.search(pattern, message)), None)
    if "does not require grad" in message and hook in _WITHOUT_GRADIENTS:
        cause = (
            "Evaluations and predictions compute no gradients. Where one is needed, use `with torch.enable_grad():`."
        )
    # Our own errors explain themselves.
    if cause is not None and not isinstance(error, PytorchAcceleratedError):
        lines.append(f"The usual cause: {cause}")
    lines.append(f"The batch: {described(batch)}.")
    add_note(error, "\n".join(lines))


def _has_note(error: Exception) -> bool:
    return any(note.startswith(_BEGINNING) for note in getattr(error, "__notes__", ()))


def add_note(error: BaseException, note: str) -> None:
    """Add a note to an exception, also in Python 3.10, which has no `add_note`."""
    error.__notes__ = [*getattr(error, "__notes__", ()), note]  # type: ignore[attr-defined]


def add_place(error: Exception, position: str) -> None:
    """Add a note to an error that ends a run, unless it has one or is one of ours, which explain themselves.

    Args:
        error: the error.
        position: the position in the run, in words.
    """
    if not isinstance(error, PytorchAcceleratedError) and not _has_note(error):
        add_note(error, f"{_BEGINNING} {position}.")


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
