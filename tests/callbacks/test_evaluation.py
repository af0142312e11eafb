"""Evaluations within training epochs, and fewer batches of them and of epochs."""

import contextlib
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from pytorch_accelerated.callbacks.evaluation import (
    LimitBatchesCallback,
    LimitEvalStepsCallback,
    StepBasedEvaluationCallback,
)
from pytorch_accelerated.callbacks.saving import SaveTrainingStateCallback
from pytorch_accelerated.errors import StopTrainingError
from pytorch_accelerated.loop.callback import TrainerCallback
from pytorch_accelerated.trainer import Trainer
from tests.callbacks.runs import Die, DieAfter, StopAfter
from tests.support.reference import regression_data, sgd, tiny_model


class CountEvaluations(TrainerCallback):
    """For each evaluation: whether it was an intermediate one, after how many updates, and its batches."""

    def __init__(self) -> None:
        self.seen: list[list[Any]] = []

    def on_eval_epoch_start(self, trainer: Trainer, is_intermediate: bool = False, **kwargs: Any) -> None:
        self.seen.append([is_intermediate, trainer.run_state.updates, 0])

    def on_eval_step_end(self, trainer: Trainer, batch: Any, batch_output: dict[str, Any], **kwargs: Any) -> None:
        self.seen[-1][2] += 1


def trainer_with(*callbacks: Any, model: nn.Module | None = None) -> tuple[Trainer, CountEvaluations]:
    model, counter = model or tiny_model(), CountEvaluations()
    return Trainer(model, nn.MSELoss(), sgd(model), callbacks=[*callbacks, counter], seed=4), counter


def train(trainer: Trainer, **kwargs: Any) -> None:
    """Two epochs of 5 updates; an evaluation has 3 batches."""
    trainer.train(regression_data(20), 2, regression_data(12), per_device_batch_size=4, **kwargs)


# Evaluations every n updates


def test_updates_are_counted_through_the_whole_run():
    trainer, counter = trainer_with(StepBasedEvaluationCallback(3))
    train(trainer)
    assert counter.seen == [[True, 3, 3], [False, 5, 3], [True, 6, 3], [True, 9, 3], [False, 10, 3]]
    records = [record for record in trainer.run_history.records if record.name == "intermediate_eval_loss"]
    assert [(record.epoch, record.update) for record in records] == [(1, 3), (2, 6), (2, 9)]


def test_every_module_is_back_in_its_own_mode_after_an_evaluation():
    class Modes(TrainerCallback):
        def __init__(self) -> None:
            self.seen: list[list[bool]] = []

        def on_train_epoch_start(self, trainer: Trainer, **kwargs: Any) -> None:
            trainer.model[0].eval()  # a frozen part

        def on_train_step_start(self, trainer: Trainer, **kwargs: Any) -> None:
            self.seen.append([module.training for module in trainer.model])

    modes = Modes()
    trainer, _ = trainer_with(StepBasedEvaluationCallback(1), modes)
    train(trainer)
    assert modes.seen == [[False, True, True]] * 10


# Shorter evaluations


@pytest.mark.parametrize(("arguments", "batches"), [((), 3), ((False,), 2)])
def test_evaluations_within_an_epoch_are_shortened_and_others_on_request(arguments: tuple[bool, ...], batches: int):
    trainer, counter = trainer_with(StepBasedEvaluationCallback(4), LimitEvalStepsCallback(2, *arguments))
    train(trainer)
    assert counter.seen == [[True, 4, 2], [False, 5, batches], [True, 8, 2], [False, 10, batches]]
    trainer.evaluate(regression_data(12), per_device_batch_size=4)
    assert counter.seen[-1] == [False, 10, batches]
    assert len(counter.seen) == 5


def test_an_evaluation_that_a_stop_interrupted_is_repeated_with_its_limit(tmp_path: Path):
    class Interrupts(TrainerCallback):
        def on_eval_epoch_start(self, trainer: Trainer, is_intermediate: bool = False, **kwargs: Any) -> None:
            raise StopTrainingError

    callbacks = StepBasedEvaluationCallback(4), LimitEvalStepsCallback(2)
    trainer, _ = trainer_with(*callbacks, Interrupts(), SaveTrainingStateCallback(tmp_path))
    train(trainer)
    trainer, counter = trainer_with(*callbacks)
    train(trainer, resume_from=tmp_path)
    assert counter.seen == [[True, 4, 2], [False, 5, 3], [True, 8, 2], [False, 10, 3]]


@pytest.mark.parametrize("limit_intermediate_only", [True, False])
@pytest.mark.parametrize("ending", [StopAfter(3), DieAfter(3)])
def test_the_whole_loader_is_back_however_the_run_ended(ending, limit_intermediate_only):
    limit = LimitEvalStepsCallback(1, limit_intermediate_only)
    trainer, counter = trainer_with(limit, ending)
    with contextlib.suppress(Die):
        train(trainer)
    assert len(trainer._eval_dataloader) == 3
    limit.limit_intermediate_only = True
    trainer.callback_handler.clear_callbacks()
    trainer.callback_handler.add_callbacks([limit, counter])
    train(trainer)
    assert [batches for _, _, batches in counter.seen] == [3, 3]


# Fewer batches in every epoch and evaluation


def test_training_epochs_and_evaluations_end_after_that_many_batches():
    trainer, counter = trainer_with(LimitBatchesCallback(2))
    train(trainer)
    assert trainer.run_state.updates == 4
    trainer.evaluate(regression_data(12), per_device_batch_size=4)
    assert [batches for _, _, batches in counter.seen] == [2, 2, 2]
    assert trainer.run_state.updates == 4
