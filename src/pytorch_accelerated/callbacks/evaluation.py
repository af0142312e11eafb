"""Evaluations within an epoch, and limits to the number of batches."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pytorch_accelerated.data.building import DataLoaderSlice, checked_limit
from pytorch_accelerated.errors import ConfigurationError
from pytorch_accelerated.facts.settings import check_positive_count
from pytorch_accelerated.loop.callback import PassLimit, TrainerCallback
from pytorch_accelerated.record.text import format_count

if TYPE_CHECKING:
    from pytorch_accelerated.data.updates import Loaders
    from pytorch_accelerated.loop.callback import Trainer


class StepBasedEvaluationCallback(TrainerCallback):
    """Evaluates within training epochs, too, and records the loss as ``intermediate_eval_loss``.

    These evaluations leave no trace in the training: afterwards, every module is in its former mode.

    >>> callbacks = [..., StepBasedEvaluationCallback(eval_every_n_steps=500)]

    Args:
        eval_every_n_steps: the number of optimizer updates between two evaluations, counted through the whole run.

    Raises:
        ArgumentTypeError, ConfigurationError: if `eval_every_n_steps` is not a whole number of at least 1.
    """

    ranks_agree_after_each_update = False

    def __init__(self, eval_every_n_steps: int) -> None:
        check_positive_count("eval_every_n_steps", eval_every_n_steps)
        self.eval_every_n_steps = eval_every_n_steps

    def on_training_run_start(self, trainer: Trainer, **kwargs: Any) -> None:
        """Reject a run without an evaluation set."""
        if trainer.run_context.parts.loaders.eval is None:
            raise ConfigurationError(
                "StepBasedEvaluationCallback has no evaluation set. Pass `eval_dataset` to `train`, or leave it out."
            )

    def on_optimizer_step_end(self, trainer: Trainer, **kwargs: Any) -> None:
        """Request an evaluation if one is due."""
        if trainer.run_state.updates % self.eval_every_n_steps == 0:
            trainer.request_evaluation()


class LimitEvalStepsCallback(TrainerCallback):
    """Ends evaluations after a number of batches.

    >>> callbacks = [..., LimitEvalStepsCallback(50)]

    Args:
        num_eval_steps: the number of batches on each rank, at least 1.
        limit_intermediate_only: whether to limit only evaluations within a training epoch.

    Raises:
        ConfigurationError: if `num_eval_steps` is not a positive whole number.
    """

    _unlimited: list[Any] | None = None  # the loaders whose places slices of them have taken

    def __init__(self, num_eval_steps: int, limit_intermediate_only: bool = True) -> None:
        self.num_eval_steps = checked_limit(num_eval_steps, name="num_eval_steps")
        self.limit_intermediate_only = limit_intermediate_only

    def on_training_run_start(self, trainer: Trainer, **kwargs: Any) -> None:
        """Limit all evaluations of the run, if none is exempt."""
        if not self.limit_intermediate_only:
            self._limit(trainer.run_context.parts.loaders)

    on_evaluation_run_start = on_training_run_start

    def on_train_epoch_start(self, trainer: Trainer, **kwargs: Any) -> None:
        """Limit the evaluations within the training epoch."""
        self._limit(trainer.run_context.parts.loaders)

    def on_train_epoch_end(self, trainer: Trainer, **kwargs: Any) -> None:
        """Give the whole loader back to the evaluation that comes next, unless all are meant."""
        if self.limit_intermediate_only:
            self.on_training_run_end(trainer)

    def on_training_run_end(self, trainer: Trainer, **kwargs: Any) -> None:
        """Give the whole loader back, however the run ended."""
        if self._unlimited is not None:
            trainer.run_context.parts.loaders.all_eval, self._unlimited = self._unlimited, None

    on_evaluation_run_end = on_exception = on_training_run_end

    def _limit(self, loaders: Loaders) -> None:
        if self._unlimited is None and loaders.eval is not None:
            self._unlimited = loaders.all_eval
            loaders.all_eval = [DataLoaderSlice(loader, self.num_eval_steps) for loader in self._unlimited]


class LimitBatchesCallback(PassLimit):
    """Ends every training epoch and every evaluation after a number of batches.

    The sizes in the run config, and schedulers created from them, still count all batches.

    >>> callbacks = [..., LimitBatchesCallback(10)]

    Args:
        num_batches: the number of batches on each rank, at least 1.

    Raises:
        ConfigurationError: if `num_batches` is not a positive whole number.
    """

    _source: str | None = "LimitBatchesCallback"
    _told_apart_by = "num_batches"  # a trainer may have two limits; the smaller one applies

    def __init__(self, num_batches: int) -> None:
        self.num_batches = checked_limit(num_batches, name="num_batches")

    def on_training_run_start(self, trainer: Trainer, **kwargs: Any) -> None:
        """Limit both loaders, and print a line, because the sizes printed elsewhere ignore the limit."""
        if self._source is not None:
            batches = format_count(self.num_batches, "batch", "batches")
            trainer.print(f"Using {batches} of each pass at most ({self._source})")
        loaders = trainer.run_context.parts.loaders
        loaders.train = DataLoaderSlice(loaders.train, self.num_batches)
        self.on_evaluation_run_start(trainer)

    def on_evaluation_run_start(self, trainer: Trainer, **kwargs: Any) -> None:
        """Limit the evaluation loader."""
        loaders = trainer.run_context.parts.loaders
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
