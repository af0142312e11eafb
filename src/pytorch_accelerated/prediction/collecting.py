"""What takes the predictions of a pass and gives them back in dataset order, each once: in memory, or on disk.

Each rank keeps or writes the rows of its own batches as they come, in blocks of bounded size. The positions of the
batches alone say where those rows belong, so the ranks tell each other nothing before the pass is over.
"""

from __future__ import annotations

import os
from typing import Any, Protocol

from pytorch_accelerated.prediction.in_memory import InMemoryPredictions
from pytorch_accelerated.prediction.stored import StoredPredictionsWriter
from pytorch_accelerated.processes.ranks import Ranks


class PredictionCollector(Protocol):
    """What takes the predictions of a pass. All ranks must make one, and `finish` it."""

    def add(self, start: int, predictions: Any) -> None:
        """Take the predictions of one batch.

        A copy off a CUDA device is only started here. It is waited for when the next batch is added, whose work is
        then already queued on the device, so the device never waits for the host.

        Args:
            start: position of the batch's first sample in the order of the whole pass; the ranks' batches do not
                overlap.
            predictions: tensors or numpy arrays, or nested tuples, lists and dicts of them; one row per sample, on
                any device. They may be changed afterwards.

        Raises:
            ArgumentTypeError: if something else is among them.
            DataError: if the tensors differ in their number of rows, or cannot be put below the earlier ones.
        """

    def finish(self) -> Any:
        """The predictions of all ranks, in dataset order. Must be called by all ranks.

        Raises:
            DataError: if those of the ranks cannot be put below each other.
        """

    def abort(self) -> None:
        """Give up: free what was kept, delete what was written. Any rank, without the others."""


def collect_predictions(ranks: Ranks, output_path: str | os.PathLike[str] | None = None) -> PredictionCollector:
    """What takes the predictions of a pass, in memory or, with `output_path`, on disk. Must be called by all ranks."""
    return InMemoryPredictions(ranks) if output_path is None else StoredPredictionsWriter(ranks, output_path)
