"""Fewer batches in every epoch and evaluation."""

from typing import Any

import pytest
from torch import nn

from pytorch_accelerated.callbacks.base import TrainerCallback
from pytorch_accelerated.callbacks.limits import LimitBatchesCallback
from pytorch_accelerated.data.slicing import LimitBatches
from pytorch_accelerated.errors import ConfigurationError
from pytorch_accelerated.trainer import Trainer
from tests.support.reference import regression_data, sgd, tiny_model


class CountBatches(TrainerCallback):
    """Batches since it was last asked."""

    def __init__(self) -> None:
        self.train = self.evaluate = 0

    def on_train_step_end(self, trainer: Trainer, **kwargs: Any) -> None:
        self.train += 1

    def on_eval_step_end(self, trainer: Trainer, **kwargs: Any) -> None:
        self.evaluate += 1

    def take(self) -> tuple[int, int]:
        counts = self.train, self.evaluate
        self.train = self.evaluate = 0
        return counts


def trainer_with(*callbacks: Any) -> tuple[Trainer, CountBatches]:
    model, counter = tiny_model(), CountBatches()
    return Trainer(model, nn.MSELoss(), sgd(model), callbacks=[*callbacks, counter]), counter


def test_training_epochs_and_evaluations_end_after_that_many_batches():
    trainer, counter = trainer_with(LimitBatchesCallback(2))
    trainer.train(regression_data(20), 3, regression_data(12), per_device_batch_size=4)
    assert counter.take() == (6, 6)
    trainer.evaluate(regression_data(12), per_device_batch_size=4)
    assert counter.take() == (0, 2)


def test_a_limit_above_the_number_of_batches_changes_nothing():
    limited, _ = trainer_with(LimitBatchesCallback(100))
    free, _ = trainer_with()
    for trainer in (limited, free):
        trainer.seed = 3
        trainer.train(regression_data(20), 2, regression_data(12), per_device_batch_size=4)
    assert limited.run_history.records == free.run_history.records


def test_a_training_run_without_an_evaluation_set_is_limited_too():
    trainer, counter = trainer_with(LimitBatchesCallback(1))
    trainer.train(regression_data(20), 2, per_device_batch_size=4)
    assert counter.take() == (2, 0)


def test_a_limit_is_reported_with_its_origin(capsys):
    with LimitBatches(2):
        trainer, _ = trainer_with(LimitBatchesCallback(3))
    trainer.train(regression_data(20), 1, per_device_batch_size=4)
    lines = capsys.readouterr().out.splitlines()
    assert "Using 3 batches of each pass at most (LimitBatchesCallback)" in lines
    assert "Using 2 batches of each pass at most (PT_ACC_LIMIT_BATCHES)" in lines
    trainer.preflight(regression_data(20), 1, per_device_batch_size=4)
    assert "Using 1 " not in capsys.readouterr().out


@pytest.mark.parametrize("own_limit", [1, 3])
def test_the_smaller_one_of_two_limits_counts(own_limit):
    with LimitBatches(2):
        trainer, counter = trainer_with(LimitBatchesCallback(own_limit))
    trainer.train(regression_data(20), 1, per_device_batch_size=4)
    assert counter.take() == (min(own_limit, 2), 0)


@pytest.mark.parametrize("limit", [0, -1, 1.5, True, "2"])
def test_a_limit_that_is_not_a_number_of_batches_is_rejected(limit):
    with pytest.raises(ConfigurationError, match="num_batches is .* at least 1"):
        LimitBatchesCallback(limit)
