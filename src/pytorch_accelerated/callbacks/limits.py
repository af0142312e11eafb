"""Limits to the number of batches, for trying things out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pytorch_accelerated.callbacks.base import TrainerCallback
from pytorch_accelerated.data.slicing import DataLoaderSlice, checked_limit
from pytorch_accelerated.progress.formats import format_count

if TYPE_CHECKING:
    from pytorch_accelerated.callbacks.base import Trainer


class LimitBatchesCallback(TrainerCallback):
    """Ends every training epoch and every evaluation after a number of batches.

    The sizes in the run config, and schedulers created from them, still count all batches.

    Args:
        num_batches: the number of batches on each rank, at least 1.

    Raises:
        ConfigurationError: if `num_batches` is not a positive whole number.
    """

    _source: str | None = "LimitBatchesCallback"

    def __init__(self, num_batches: int) -> None:
        self.num_batches = checked_limit(num_batches, name="num_batches")

    @property
    def state_key(self) -> str:
        """The class and the limit. A trainer may have several limits, of which the smallest applies."""
        return f"{type(self).__name__}({self.num_batches})"

    def on_training_run_start(self, trainer: Trainer, **kwargs: Any) -> None:
        """Limit both loaders, and print a line, because the sizes printed elsewhere ignore the limit."""
        if self._source is not None:
            batches = format_count(self.num_batches, "batch", "batches")
            trainer.print(f"Using {batches} of each pass at most ({self._source})")
        loaders = trainer.internal_run.loaders
        loaders.train = DataLoaderSlice(loaders.train, self.num_batches)
        self._limit_evaluation(trainer)

    def on_evaluation_run_start(self, trainer: Trainer, **kwargs: Any) -> None:
        """Limit the evaluation loader."""
        self._limit_evaluation(trainer)

    def _limit_evaluation(self, trainer: Trainer) -> None:
        loaders = trainer.internal_run.loaders
        if loaders.eval is not None:
            loaders.all_eval = [DataLoaderSlice(loader, self.num_batches) for loader in loaders.all_eval]


class OuterLimit(LimitBatchesCallback):
    """A limit that the user's callbacks do not contain: from the environment, or of `Trainer.preflight`.

    Args:
        num_batches: the number of batches on each rank, at least 1.
        source: the origin of the limit, for the printed line; None prints no line.
    """

    def __init__(self, num_batches: int, source: str | None = None) -> None:
        super().__init__(num_batches)
        self._source = source
