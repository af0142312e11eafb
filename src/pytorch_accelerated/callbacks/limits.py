"""Fewer batches than the data has: for trying things out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pytorch_accelerated.callbacks.base import TrainerCallback
from pytorch_accelerated.data.slicing import DataLoaderSlice, checked_limit

if TYPE_CHECKING:
    from pytorch_accelerated.trainer import Trainer


class LimitBatchesCallback(TrainerCallback):
    """Ends every training epoch and every evaluation after a number of batches.

    What the run config says about sizes, and schedulers that are made from it, still count all batches.

    Args:
        num_batches: batches of one rank, at least 1.

    Raises:
        ConfigurationError: if `num_batches` is not a positive whole number.
    """

    _source: str | None = "LimitBatchesCallback"

    def __init__(self, num_batches: int) -> None:
        self.num_batches = checked_limit(num_batches, name="num_batches")

    @property
    def state_key(self) -> str:
        """The limit is part of it: several of them may be at work, and the smallest one counts."""
        return f"{type(self).__name__}({self.num_batches})"

    def on_training_run_start(self, trainer: Trainer, **kwargs: Any) -> None:
        """Limit both loaders, and say so: the sizes that are shown elsewhere do not tell."""
        if self._source is not None:
            trainer.print(f"Using {self.num_batches} batches of each pass at the most ({self._source})")
        trainer._train_dataloader = DataLoaderSlice(trainer._train_dataloader, self.num_batches)
        self._limit_evaluation(trainer)

    def on_evaluation_run_start(self, trainer: Trainer, **kwargs: Any) -> None:
        """Limit the evaluation loader."""
        self._limit_evaluation(trainer)

    def _limit_evaluation(self, trainer: Trainer) -> None:
        if trainer._eval_dataloader is not None:
            trainer._eval_dataloader = DataLoaderSlice(trainer._eval_dataloader, self.num_batches)


class OuterLimit(LimitBatchesCallback):
    """A limit that comes from outside, beside whatever callbacks the user has: the environment, or a rehearsal.

    Args:
        num_batches: batches of one rank, at least 1.
        source: what to say where it comes from; None: say nothing.
    """

    def __init__(self, num_batches: int, source: str | None = None) -> None:
        super().__init__(num_batches)
        self._source = source
