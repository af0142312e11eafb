"""Metrics that are plain functions of all predictions and targets of an evaluation."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch

from pytorch_accelerated.callbacks.warning import warn_user
from pytorch_accelerated.errors import ArgumentTypeError, ConfigurationError, HookOutputError, PytorchAcceleratedError
from pytorch_accelerated.prediction.in_memory import InMemoryPredictions
from pytorch_accelerated.processes.ranks import Ranks
from pytorch_accelerated.tracking.values import is_scalar, stored_value
from pytorch_accelerated.trees import leaves_by_path

MetricFunction = Callable[[Any, Any], Any]

_NAMES_OF_LOSSES = ("loss", "loss_epoch")  # "eval_loss_epoch" and "intermediate_eval_loss" are those of the loop

_ONE_VALUE = (float, int, torch.Tensor, "float", "int", "Tensor", "torch.Tensor")  # annotations may be strings


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
        self._has_warned = False

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
        self._collector(key, ranks).add(start, {"predictions": predictions, "targets": targets})

    def compute(self, key: str, ranks: Ranks) -> dict[str, float]:
        """The values over the rows of all ranks, by name, the same on all ranks. Must be called by all ranks.

        Raises:
            HookOutputError: if a function fails, or returns something else than numbers.
        """
        rows = self._collector(key, ranks).finish()
        self.forget(key)
        if not self._has_warned and _would_broadcast(rows["predictions"], rows["targets"]):
            self._has_warned = True
            shapes = tuple(rows["predictions"].shape), tuple(rows["targets"].shape)
            warn_user(
                ranks,
                f"MetricsCallback has predictions of shape {shapes[0]} and targets of shape {shapes[1]}. A function "
                "that compares them by `==` or `-` compares each prediction with each target, so its value is wrong. "
                "Give them the same shape, for example with predictions=lambda outputs: outputs[:, 0] > 0, unless the "
                "function takes care of it.",
            )
        return ranks.do_on_first(lambda: self._values(rows["predictions"], rows["targets"]))

    def _collector(self, key: str, ranks: Ranks) -> InMemoryPredictions:
        if key not in self._rows:
            source = "`predictions` and `targets` of MetricsCallback (or its `get_predictions_and_targets`)"
            self._rows[key] = InMemoryPredictions(ranks, source=source)
        return self._rows[key]

    def _values(self, predictions: Any, targets: Any) -> dict[str, float]:
        found: dict[str, float] = {}
        for name, function in self.functions.items():
            for full_name, value in _values_of(name, function, predictions, targets).items():
                if full_name in found:
                    raise ConfigurationError(
                        f"Two metrics are called {full_name!r}: one of them is an entry of the dict that the function "
                        f"of the metric {name!r} returned. Give them different names."
                    )
                found[full_name] = value
        return found


def divided(metrics: Any) -> tuple[dict[str, MetricFunction], Any]:
    """The functions in `metrics` by name, and the rest: metrics of torchmetrics in any form, or None if there are none.

    Raises:
        ArgumentTypeError: for a function without a name, or one that cannot be called with predictions and targets.
        ConfigurationError: for a name that the loop uses itself.
    """
    if not isinstance(metrics, Mapping):
        given = list(metrics) if isinstance(metrics, (list, tuple)) else [metrics]
        nameless = [_name_of(each) for each in given if callable(each) and not _is_of_torchmetrics(each)]
        if nameless:
            raise ArgumentTypeError(
                f"The metric {nameless[0]} has no name to be recorded under. Pass a dict, for example "
                f"MetricsCallback({{'accuracy': {nameless[0]}}})."
            )
        return {}, metrics
    functions = {name: metric for name, metric in metrics.items() if not _is_of_torchmetrics(metric)}
    for name, function in functions.items():
        _check_function(name, function)
    others = {name: metric for name, metric in metrics.items() if name not in functions}
    return functions, others or None


def returns_one_value(function: Callable[..., Any]) -> bool:
    """Whether `function` declares that it returns one value, not a dict of values."""
    try:
        declared = inspect.signature(function).return_annotation
    except (TypeError, ValueError):
        return False
    return declared in _ONE_VALUE


def _check_function(name: Any, function: Any) -> None:
    if not isinstance(name, str) or not name:
        raise ArgumentTypeError(f"{name!r} cannot be the name of a metric. Use a string that is not empty.")
    if name in _NAMES_OF_LOSSES:
        raise ConfigurationError(
            f"A metric cannot be called {name!r}: the trainer records the mean loss as 'eval_loss_epoch' and "
            "'intermediate_eval_loss'. Use another name."
        )
    if isinstance(function, type) or not callable(function):
        remedy = f"an instance, {function.__name__}(...)," if isinstance(function, type) else "a function"
        raise ArgumentTypeError(
            f"The metric {name!r} is {_name_of(function)}, which is neither a function nor a metric of torchmetrics. "
            f"Pass {remedy} or, for example, `lambda predictions, targets: ...`."
        )
    try:
        inspect.signature(function).bind(None, None)
    except ValueError:  # some functions in C have no signature
        return
    except TypeError as error:
        raise ArgumentTypeError(
            f"The metric {name!r} is called with the predictions and the targets, in this order, but "
            f"{_name_of(function)} cannot be ({error}). Pass `lambda predictions, targets: ...`."
        ) from error


def _values_of(name: str, function: MetricFunction, predictions: Any, targets: Any) -> dict[str, float]:
    try:
        result = function(predictions, targets)
    except PytorchAcceleratedError:
        raise
    except Exception as error:
        raise HookOutputError(
            f"The function of the metric {name!r} failed with {type(error).__name__}: {error}. It was called with the "
            f"predictions {_described(predictions)} and the targets {_described(targets)}, in this order. "
            "`predictions` and `targets` of MetricsCallback say what they are."
        ) from error
    values = {str(key): value for key, value in result.items()} if isinstance(result, Mapping) else {name: result}
    values = {key: stored_value(value) for key, value in values.items()}
    for key, value in values.items():
        _check_value(name, key, value)
    return values


def _check_value(name: str, key: str, value: Any) -> None:
    where = "" if key == name else f" in the entry {key!r} of its dict"
    if not is_scalar(value):
        raise HookOutputError(
            f"The function of the metric {name!r} returned {_described(value)}{where}, but a metric is one number. "
            "Return a number, or a dict of numbers, which are recorded by their names."
        )
    if key in _NAMES_OF_LOSSES:
        raise ConfigurationError(
            f"The function of the metric {name!r} returned a number called {key!r}, a name under which the trainer "
            "records the mean loss. Use another name."
        )


def _would_broadcast(predictions: Any, targets: Any) -> bool:
    """Whether one of them is a column and the other one has no columns, which torch makes a square table of."""
    if not (isinstance(predictions, torch.Tensor) and isinstance(targets, torch.Tensor)):
        return False
    dimensions = {each.ndim: each.shape for each in (predictions, targets)}
    return set(dimensions) == {1, 2} and dimensions[2][1] == 1 < dimensions[1][0]


def _is_of_torchmetrics(metric: Any) -> bool:
    torchmetrics = sys.modules.get("torchmetrics")  # without it, there can't be one
    return torchmetrics is not None and isinstance(metric, (torchmetrics.Metric, torchmetrics.MetricCollection))


def _name_of(function: Any) -> str:
    return getattr(function, "__name__", None) or repr(function)


def _described(value: Any) -> str:
    """Kinds and shapes of nested tensors; anything else as it prints, in short."""
    parts = [
        f"{path} {leaf.dtype} of shape {tuple(leaf.shape)}".strip()
        for path, leaf in leaves_by_path(value).items()
        if isinstance(leaf, torch.Tensor) or hasattr(leaf, "shape")
    ]
    return ", ".join(parts) or f"{value!r:.100}"
