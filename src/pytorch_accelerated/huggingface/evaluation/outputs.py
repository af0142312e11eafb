"""Results of training, evaluation and prediction, and the input of metrics."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple


class TrainOutput(NamedTuple):
    """The result of `Trainer.train`.

    Attributes:
        global_step: updates done, including those before a resume.
        training_loss: mean over the steps of this call.
        metrics: the last entry of the log history.
    """

    global_step: int
    training_loss: float
    metrics: dict[str, float]


class PredictionOutput(NamedTuple):
    """The result of `Trainer.predict`.

    Attributes:
        predictions: an array with the rows in the order of the dataset; a tuple of them for several outputs.
        label_ids: likewise; None without labels, an empty tuple for a model whose loss needs none.
        metrics: by name, with prefix.
    """

    predictions: Any
    label_ids: Any
    metrics: dict[str, float] | None


class EvalLoopOutput(NamedTuple):
    """The result of `Trainer.evaluation_loop`: like `PredictionOutput`, with the number of rows."""

    predictions: Any
    label_ids: Any
    metrics: dict[str, float] | None
    num_samples: int | None


class EvalPrediction:
    """The argument of `compute_metrics`; ``predictions, label_ids = prediction`` works too.

    Args:
        predictions: of the model, in the order of the dataset; a tuple for several outputs.
        label_ids: the labels, likewise.
        inputs: of the model, if ``include_for_metrics`` asks for them, like `losses` of the rows.
    """

    def __init__(self, predictions: Any, label_ids: Any, inputs: Any = None, losses: Any = None) -> None:
        self.predictions = predictions
        self.label_ids = label_ids
        self.inputs = inputs
        self.losses = losses

    @property
    def elements(self) -> tuple[Any, ...]:
        """The predictions, the labels and, if there are any, the inputs and the losses."""
        extras = tuple(extra for extra in (self.inputs, self.losses) if extra is not None)
        return (self.predictions, self.label_ids, *extras)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.elements)

    def __getitem__(self, index: int) -> Any:
        return self.elements[index]
