"""Metrics that are plain functions of all predictions and targets of an evaluation, and what these are."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch

from pytorch_accelerated.errors import ArgumentTypeError, ConfigurationError, HookOutputError
from pytorch_accelerated.prediction.collecting import InMemoryPredictions
from pytorch_accelerated.processes.ranks import Ranks
from pytorch_accelerated.tracking.values import is_scalar, stored_value
from pytorch_accelerated.trees import leaves_by_path, would_broadcast

MetricFunction = Callable[[Any, Any], Any]

Choice = str | Callable[[Any], Any] | None
"""Which part: the usual one, one by name, or what a function returns."""

_NAMES_OF_LOSSES = ("loss", "loss_epoch")  # "eval_loss_epoch" and "intermediate_eval_loss" are those of the loop


class MetricFunctions:
    """Collects the rows of evaluations, and computes functions of them.

    Evaluations of several models may overlap, so rows are kept by a key. Each rank keeps its own rows in host memory
    until the evaluation is over; then every rank has all rows for a moment, and rank 0 computes.

    Args:
        functions: functions of (predictions, targets), by name.
    """

    def __init__(self, functions: Mapping[str, MetricFunction]) -> None:
        self.functions = dict(functions)
        self._rows: dict[str, InMemoryPredictions] = {}
        self._batches = 0

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(self.functions)})"

    def forget(self, key: str) -> None:
        """Forget the rows of an evaluation, which begins or was given up."""
        self._batches = 0
        self._rows.pop(key, None)

    def forget_all(self) -> None:
        """Forget all rows."""
        self._rows.clear()

    def add(self, key: str, start: int | None, predictions: Any, targets: Any, ranks: Ranks) -> None:
        """Take the rows of a batch; `start` is the position of its first sample, if that is known."""
        if start is None:  # in a loop of the user's own, which probably deals batches out in turn
            start = self._batches * ranks.count + ranks.index
        self._batches += 1
        if would_broadcast(predictions, targets):
            shapes = tuple(predictions.shape), tuple(targets.shape)
            raise HookOutputError(
                f"MetricsCallback has predictions of shape {shapes[0]} and targets of shape {shapes[1]}, so a function "
                "that compares them by `==` or `-` would compare each prediction with each target. Give them the same "
                "shape, for example with predictions=lambda outputs: outputs.squeeze(-1) > 0."
            )
        self._collector(key, ranks).add(start, {"predictions": predictions, "targets": targets})

    def compute(self, key: str, ranks: Ranks) -> dict[str, float]:
        """The values over the rows of all ranks, by name, the same on all ranks. Must be called by all ranks.

        Raises:
            HookOutputError: if a function fails, or returns something else than numbers.
        """
        rows = self._collector(key, ranks).finish()
        self.forget(key)
        return ranks.do_on_first(lambda: self._values(rows["predictions"], rows["targets"]))

    def _collector(self, key: str, ranks: Ranks) -> InMemoryPredictions:
        if key not in self._rows:
            source = "`predictions` and `targets` of MetricsCallback (or its `get_predictions_and_targets`)"
            self._rows[key] = InMemoryPredictions(ranks, source=source)
        return self._rows[key]

    def _values(self, predictions: Any, targets: Any) -> dict[str, float]:
        found: dict[str, float] = {}
        for name, function in self.functions.items():
            found |= _values_of(name, function, predictions, targets)
        return found


def divided(metrics: Any) -> tuple[dict[str, MetricFunction], Any]:
    """The functions in `metrics` by name, and the rest: metrics of torchmetrics in any form, or None if there are none.

    Raises:
        ArgumentTypeError: for a function without a name, or something else.
        ConfigurationError: for a name that the loop uses itself.
    """
    if not isinstance(metrics, Mapping):
        for each in metrics if isinstance(metrics, (list, tuple)) else [metrics]:
            if not _is_of_torchmetrics(each) and (callable(each) or isinstance(each, str)):
                name = getattr(each, "__name__", each)
                raise ArgumentTypeError(
                    f"{name!r} is not a metric with a name to be recorded under. Pass a function under a name, "
                    f"MetricsCallback({{{name!r}: function}}), or an instance of a metric of torchmetrics."
                )
        return {}, metrics
    functions = {name: metric for name, metric in metrics.items() if not _is_of_torchmetrics(metric)}
    for name, function in functions.items():
        _check_function(name, function)
    others = {name: metric for name, metric in metrics.items() if name not in functions}
    return functions, others or None


def _check_function(name: str, function: Any) -> None:
    if name in _NAMES_OF_LOSSES:
        raise ConfigurationError(
            f"A metric cannot be called {name!r}: the trainer records the mean loss as 'eval_loss_epoch' and "
            "'intermediate_eval_loss'. Use another name."
        )
    if isinstance(function, type) or not callable(function):
        remedy = f"an instance, {function.__name__}(...)," if isinstance(function, type) else "a function"
        raise ArgumentTypeError(
            f"The metric {name!r} is {function!r}, which is neither a function nor a metric of torchmetrics. Pass "
            f"{remedy} or, for example, `lambda predictions, targets: ...`."
        )


def _values_of(name: str, function: MetricFunction, predictions: Any, targets: Any) -> dict[str, float]:
    try:
        result = function(predictions, targets)
    except Exception as error:
        raise HookOutputError(
            f"The function of the metric {name!r} failed with {type(error).__name__}: {error}. It was called with the "
            f"predictions {_described(predictions)} and the targets {_described(targets)}, in this order. "
            "`predictions` and `targets` of MetricsCallback say what they are."
        ) from error
    values = {str(key): value for key, value in result.items()} if isinstance(result, Mapping) else {name: result}
    values = {key: stored_value(value) for key, value in values.items()}
    for key, value in values.items():
        if not is_scalar(value):
            where = "" if key == name else f" in the entry {key!r} of its dict"
            raise HookOutputError(
                f"The function of the metric {name!r} returned {_described(value)}{where}, but a metric is one number. "
                "Return a number, or a dict of numbers, which are recorded by their names."
            )
    return values


def _is_of_torchmetrics(metric: Any) -> bool:
    torchmetrics = sys.modules.get("torchmetrics")  # without it, there can't be one
    return torchmetrics is not None and isinstance(metric, (torchmetrics.Metric, torchmetrics.MetricCollection))


def _described(value: Any) -> str:
    """Kinds and shapes of nested tensors; anything else as it prints, in short."""
    parts = [
        f"{path} {leaf.dtype} of shape {tuple(leaf.shape)}".strip()
        for path, leaf in leaves_by_path(value).items()
        if isinstance(leaf, torch.Tensor) or hasattr(leaf, "shape")
    ]
    return ", ".join(parts) or f"{value!r:.100}"


def predictions_of(outputs: Any, choice: Choice) -> Any:
    """The predictions in a model's outputs; see `MetricsCallback`."""
    if callable(choice):
        return choice(outputs)
    if choice is None or choice == "argmax":
        predictions = _entry(outputs, "logits", "predictions") if isinstance(outputs, Mapping) else outputs
        return predictions if choice is None else _argmax(predictions)
    return _entry(outputs, choice, "predictions")


def targets_of(batch: Any, choice: Choice) -> Any:
    """The targets in a batch; see `MetricsCallback`."""
    if callable(choice):
        return choice(batch)
    if choice is None and isinstance(batch, (tuple, list)) and len(batch) > 1:
        return batch[1]
    return _entry(batch, choice or "labels", "targets")


def _entry(data: Any, name: str, of: str) -> Any:
    if isinstance(data, Mapping) and name in data:
        return data[name]
    has = f" with the entries {', '.join(map(repr, data))}" if isinstance(data, Mapping) else ""
    raise HookOutputError(
        f"MetricsCallback found no {of}: there is no entry {name!r} in a {type(data).__name__}{has}. Pass `{of}`: the "
        "name of an entry, or a function; or override `get_predictions_and_targets` to say where they are."
    )


def _argmax(predictions: Any) -> torch.Tensor:
    if not isinstance(predictions, torch.Tensor) or predictions.ndim < 2 or predictions.shape[-1] == 1:
        raise HookOutputError(
            "predictions='argmax' takes the class with the highest score in the last dimension, but the model's "
            f"outputs are {_described(predictions)}, without a dimension of several classes. Pass a function, for "
            "example predictions=lambda outputs: outputs[:, 0] > 0."
        )
    return predictions.argmax(dim=-1)
