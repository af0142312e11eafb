"""The rows of the updates of a run: of the last one, or of one that is described by the arguments of `train`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pytorch_accelerated.callbacks.base import TrainerCallback
from pytorch_accelerated.callbacks.evaluation import LimitBatchesCallback
from pytorch_accelerated.data.run_plan import RunPlan
from pytorch_accelerated.errors import ConfigurationError, StopTrainingError
from pytorch_accelerated.looking.rehearsal import preparing, rehearsal
from pytorch_accelerated.training.checks import refuse_within_a_run

if TYPE_CHECKING:
    from pytorch_accelerated.callbacks.base import Trainer


def find_plan(
    trainer: Trainer, method: str, train_dataset: Any, num_epochs: int | None, train_arguments: Mapping[str, Any]
) -> RunPlan:
    """What determines the rows of the updates of a run, for the trainer's `method`; see `Trainer.rows_of`.

    Raises:
        ConfigurationError: if there was no run, or if the seed of the one that is described is not known.
    """
    last: RunPlan | None = trainer.run_context.plan
    if train_dataset is None:
        if last is None or train_arguments or num_epochs is not None:
            raise ConfigurationError(
                f"`{method}` got no `train_dataset`: without any arguments, it is about the last run, of which there "
                f"{'is none' if last is None else 'is one'}. Pass all arguments that `train` gets."
            )
        return last
    refuse_within_a_run(trainer.run_context, method, "Leave the arguments of `train` out, for the current run.")
    given = trainer.run_context.given
    if given.seed is None and last is not None:
        given = dataclasses.replace(given, seed=last.seed)
    if given.seed is None and train_arguments.get("resume_from") is None:
        raise ConfigurationError(
            "The trainer has no seed, so the order of the samples is decided when a run starts. Make it with one, "
            "`Trainer(..., seed=0)`, or pass `resume_from`: a training state has the seed of its run."
        )
    limits = [callback for callback in trainer.callback_handler if isinstance(callback, LimitBatchesCallback)]
    with rehearsal(trainer, [*preparing(trainer.callback_handler), *limits, _StopsAtOnce()]):
        trainer.run_context.given = given
        trainer.train(train_dataset, num_epochs, **train_arguments)
        plan = trainer.run_context.plan
    assert plan is not None
    return plan


class _StopsAtOnce(TrainerCallback):
    """Ends a run before its first update."""

    def on_training_run_start(self, trainer: Trainer, **kwargs: Any) -> None:
        raise StopTrainingError("The rows of its updates are known.")
