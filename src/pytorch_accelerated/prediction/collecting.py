"""Collectors of the predictions of a pass, in memory or on disk: they return the rows in dataset order, each once.

Each rank keeps or writes the rows of its own batches as they come, in blocks of bounded size. The position of a batch
says where its rows belong, so the ranks need not communicate before the end of the pass.
"""

from __future__ import annotations

import os
from typing import Any, Protocol

from pytorch_accelerated.prediction.in_memory import InMemoryPredictions
from pytorch_accelerated.prediction.stored import StoredPredictionsWriter
from pytorch_accelerated.processes.ranks import Ranks


class PredictionCollector(Protocol):
    """Collects the predictions of a pass. All ranks must create one and `finish` it."""

    def add(self, start: int, predictions: Any) -> None:
        """Take the predictions of one batch.

        Copies off a CUDA device are only started here; see `ArrivingRows`.

        Args:
            start: position of the batch's first sample in the whole pass; batches do not overlap.
            predictions: tensors or numpy arrays, or nested tuples, lists and dicts of them; one row per sample, on
                any device. They may be changed afterwards.

        Raises:
            ArgumentTypeError: if they contain anything else.
            DataError: if the tensors differ in their number of rows, or cannot be joined with the earlier ones.
        """

    def finish(self) -> Any:
        """The predictions of all ranks, in dataset order. Must be called by all ranks.

        Raises:
            DataError: if the predictions of the ranks cannot be joined.
        """

    def abort(self) -> None:
        """Free the rows and delete files. A rank may call it without the others."""


def collect_predictions(ranks: Ranks, output_path: str | os.PathLike[str] | None = None) -> PredictionCollector:
    """A collector in memory or, with `output_path`, on disk. Must be called by all ranks."""
    return InMemoryPredictions(ranks) if output_path is None else StoredPredictionsWriter(ranks, output_path)
