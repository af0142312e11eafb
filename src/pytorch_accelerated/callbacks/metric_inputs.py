"""What metrics are computed from: predictions out of a model's outputs, and targets out of a batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from pytorch_accelerated.errors import ArgumentTypeError, HookOutputError

Choice = str | Callable[[Any], Any] | None
"""Which part: the usual one, one by name, or what a function returns."""


def check_choice(argument: str, choice: Any) -> None:
    """Reject a value of `predictions` or `targets` that is none.

    Raises:
        ArgumentTypeError: if it is neither None nor a string nor a function.
    """
    if not (choice is None or isinstance(choice, str) or callable(choice)):
        raise ArgumentTypeError(
            f"`{argument}` of MetricsCallback is {choice!r}. Pass the name of an entry, a function, or None."
        )


def predictions_of(outputs: Any, choice: Choice) -> Any:
    """The predictions in a model's outputs; see `MetricsCallback`."""
    if callable(choice):
        return choice(outputs)
    if choice is None or choice == "argmax":
        predictions = _entry(outputs, "logits", "outputs") if isinstance(outputs, Mapping) else outputs
        return predictions if choice is None else _argmax(predictions)
    return _entry(outputs, choice, "outputs")


def targets_of(batch: Any, choice: Choice) -> Any:
    """The targets in a batch; see `MetricsCallback`."""
    if callable(choice):
        return choice(batch)
    if choice is not None or isinstance(batch, Mapping):
        return _entry(batch, choice or "labels", "batch")
    if not isinstance(batch, (tuple, list)) or len(batch) < 2:
        raise HookOutputError(
            f"MetricsCallback found no targets in a batch ({_described(batch)}). Pass `targets`: the name of an entry, "
            "or a function of the batch; or override `get_predictions_and_targets` to say where they are."
        )
    return batch[1]


def _entry(data: Any, name: str, of: str) -> Any:
    if isinstance(data, Mapping) and name in data:
        return data[name]
    argument, what = ("predictions", "predictions") if of == "outputs" else ("targets", "targets")
    source = "the model's outputs" if of == "outputs" else "a batch"
    raise HookOutputError(
        f"MetricsCallback found no {what} in {source}: there is no entry {name!r} in {_described(data)}. Pass "
        f"`{argument}`: the name of an entry, or a function of the {of}; or override `get_predictions_and_targets` to "
        "say where they are."
    )


def _argmax(predictions: Any) -> torch.Tensor:
    if not isinstance(predictions, torch.Tensor) or predictions.ndim < 2 or predictions.shape[-1] == 1:
        is_tensor = isinstance(predictions, torch.Tensor)
        shape = f" of shape {tuple(predictions.shape)}" if is_tensor else ""
        column = "[:, 0]" if is_tensor and predictions.ndim == 2 else ""
        raise HookOutputError(
            f"predictions='argmax' takes the class with the highest score in the last dimension, but the model's "
            f"outputs are {_described(predictions)}{shape}, without a dimension of several classes. Pass a function, "
            f"for example predictions=lambda outputs: outputs{column} > 0."
        )
    return predictions.argmax(dim=-1)


def _described(data: Any) -> str:
    if isinstance(data, Mapping):
        return f"a {type(data).__name__} with the entries {', '.join(map(repr, data)) or '(none)'}"
    if isinstance(data, (tuple, list)):
        return f"a {type(data).__name__} of {len(data)} items"
    return f"a {type(data).__name__}"
