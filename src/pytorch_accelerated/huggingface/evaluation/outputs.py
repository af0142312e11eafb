"""What training, evaluating and predicting return, and what metrics are computed from."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple


class TrainOutput(NamedTuple):
    """What `Trainer.train` returns.

    Attributes:
        global_step: updates done, those before a resume included.
        training_loss: mean over the steps of this call.
        metrics: the last entry of the log history.
    """

    global_step: int
    training_loss: float
    metrics: dict[str, float]


class PredictionOutput(NamedTuple):
    """What `Trainer.predict` returns.

    Attributes:
        predictions: an array with one row per row of the dataset, in its order; a tuple of them for several outputs.
        label_ids: likewise; None without labels, an empty tuple for a model that returns a loss without any.
        metrics: by name, with prefix.
    """

    predictions: Any
    label_ids: Any
    metrics: dict[str, float] | None


class EvalLoopOutput(NamedTuple):
    """What `Trainer.evaluation_loop` returns: as `PredictionOutput`, with the number of rows."""

    predictions: Any
    label_ids: Any
    metrics: dict[str, float] | None
    num_samples: int | None


class EvalPrediction:
    """What a `compute_metrics` function gets; ``predictions, label_ids = prediction`` works too.

    Iterating and indexing go over the predictions, the labels and, where they are there, the inputs and the losses.

    Args:
        predictions: of the model, one row per row of the dataset; a tuple for several outputs.
        label_ids: the labels, likewise.
        inputs: what the model was given, if ``include_for_metrics`` says so.
        losses: of the rows, likewise.
    """

    def __init__(self, predictions: Any, label_ids: Any, inputs: Any = None, losses: Any = None) -> None:
        self.predictions = predictions
        self.label_ids = label_ids
        self.inputs = inputs
        self.losses = losses

    @property
    def elements(self) -> tuple[Any, ...]:
        """What there is."""
        extras = tuple(extra for extra in (self.inputs, self.losses) if extra is not None)
        return (self.predictions, self.label_ids, *extras)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.elements)

    def __getitem__(self, index: int) -> Any:
        return self.elements[index]
