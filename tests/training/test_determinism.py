"""The same run twice gives the same bits, whoever fetches the data; and nobody else's random numbers change."""

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from pytorch_accelerated import Trainer
from pytorch_accelerated.callbacks import TrainerCallback
from tests.support.randomness import Augmented, digest, train_randomly
from tests.support.reference import assert_same_parameters, regression_data, sgd, tiny_model


def generators() -> list[Any]:
    numpy_state: Any = np.random.get_state()
    return [torch.get_rng_state().tolist(), numpy_state[1].tolist(), numpy_state[2:], random.getstate()]


@pytest.mark.filterwarnings("ignore:This DataLoader will create")  # more workers than some machines have processors
def test_the_number_of_workers_changes_no_bit() -> None:
    assert len({digest(train_randomly(3, workers=workers)) for workers in (0, 1, 2, 4)}) == 1


def test_two_runs_with_the_same_seed_are_the_same_and_others_are_not() -> None:
    first = digest(train_randomly(3))
    torch.manual_seed(99)  # a seed that was given is not mixed with anything
    np.random.seed(99)
    random.seed(99)
    assert digest(train_randomly(3)) == digest(train_randomly(np.int64(3))) == first
    assert len({digest(train_randomly(seed)) for seed in (0, 1, 2, 2**32)} | {first}) == 5


def test_without_a_seed_the_state_of_torchs_generator_decides() -> None:
    def run(seed: int, **kwargs: Any) -> str:
        torch.manual_seed(seed)
        return digest(train_randomly(None, **kwargs))

    first = run(7)
    assert run(7) == run(7, workers=2) == first
    assert run(8) != first
    torch.manual_seed(7)
    torch.rand(1)
    assert digest(train_randomly(None)) != first


def test_a_second_run_of_one_trainer_has_its_own_order() -> None:
    class Orders(TrainerCallback):
        def __init__(self) -> None:
            self.seen: list[Any] = []

        def on_train_step_end(self, trainer: Trainer, batch: Any, **kwargs: Any) -> None:
            self.seen[-1].append(batch[0][:, 0].tolist())

        def on_train_epoch_start(self, trainer: Trainer, **kwargs: Any) -> None:
            self.seen.append([])

    data = regression_data(20)
    for seed in (None, 5):
        trainer = Trainer(model := tiny_model(), nn.MSELoss(), sgd(model), callbacks=[orders := Orders()], seed=seed)
        trainer.train(data, 2)
        seeds = [trainer.run_config.seed]
        trainer.train(data, 2)
        seeds.append(trainer.run_config.seed)
        different = {repr(epoch) for epoch in orders.seen}
        assert len(different) == (4 if seed is None else 2), "each epoch has its own order"
        assert (seeds[0] == seeds[1]) == (seed is not None), "a seed that was given is the seed of every run"


@pytest.mark.parametrize("workers", [0, 2])
def test_a_run_without_dropout_leaves_all_generators_as_they_were(workers: int) -> None:
    trainer = Trainer(model := tiny_model(), nn.MSELoss(), sgd(model), callbacks=())
    kwargs = {"num_workers": workers}
    before = generators()
    for data in (Augmented(), regression_data(9), DataLoader(TensorDataset(*regression_data(9)), shuffle=True)):
        trainer.train(data, 2, data, train_dataloader_kwargs=kwargs, eval_dataloader_kwargs=kwargs)
        trainer.evaluate(data, dataloader_kwargs=kwargs)
    for data in (Augmented(), regression_data(9)):
        trainer.predict(data, dataloader_kwargs=kwargs)
    assert generators() == before


class LooksAround(TrainerCallback):
    """Predicts and evaluates in the middle of things, with data that draws random numbers."""

    def on_optimizer_step_end(self, trainer: Trainer, **kwargs: Any) -> None:
        trainer.predict(Augmented())
        trainer.request_evaluation()


@pytest.mark.parametrize("workers", [0, 1])
def test_evaluating_and_predicting_in_between_changes_no_weight(workers: int) -> None:
    torch.manual_seed(1)
    plain = train_randomly(3, evaluates=False)
    for change in (None, lambda trainer: trainer.callback_handler.add_callback(LooksAround())):
        torch.manual_seed(2)
        assert_same_parameters(train_randomly(3, change=change, workers=workers).model, plain.model, tolerance=0)
