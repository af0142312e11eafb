"""Iterables of batches are taken as such, and the run says so, because they might have been meant as samples."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from pytorch_accelerated import Trainer
from tests.support.reference import assert_same_parameters, regression_data, sgd, tiny_model

ROWS = TensorDataset(*regression_data(12))
BATCHES = [ROWS[start : start + 5] for start in range(0, 12, 5)]


class Again:
    """Batches that can be iterated over again."""

    def __iter__(self) -> Iterator[Any]:
        return iter(BATCHES)


def make(base: type[Trainer] = Trainer, **kwargs: Any) -> Trainer:
    return base(model := tiny_model(), nn.MSELoss(), sgd(model), seed=1, **kwargs)


ITERATORS: dict[str, Callable[[], Any]] = {
    "generator": lambda: (batch for batch in BATCHES),
    "list_iterator": lambda: iter(BATCHES),
    "map": lambda: map(tuple, BATCHES),
}


@pytest.mark.parametrize("name", ITERATORS)
def test_the_first_line_of_a_run_says_that_an_iterator_yields_batches(name: str, capsys: Any) -> None:
    trainer = make()
    trainer.train(ITERATORS[name](), 1)
    first = capsys.readouterr().out.splitlines()[0]
    assert first.startswith(f"The {name} is treated as an iterable of batches, not of samples")
    assert first.endswith("The first batch has size 5.")

    class OfBatches(Trainer):
        def create_train_dataloader(self, batch_size: int, train_dl_kwargs: Any = None) -> Any:
            return BATCHES

    of_list = make(OfBatches, callbacks=())
    of_list.train(ROWS, 1)
    assert_same_parameters(trainer.model, of_list.model)  # looked at, and used all the same
    assert capsys.readouterr().out == ""  # nobody could take a list of batches for something else


def test_evaluation_and_prediction_say_so_too(capsys: Any) -> None:
    trainer = make(callbacks=())
    loss = trainer.evaluate(batch for batch in BATCHES)["evaluation_loss"]
    outputs = trainer.predict(batch[0] for batch in BATCHES)
    said = capsys.readouterr().out.splitlines()
    assert [line.split(" is treated")[0] for line in said] == ["The generator", "The generator"]
    assert torch.equal(outputs, trainer.predict(ROWS))
    assert loss == pytest.approx(trainer.evaluate(ROWS)["evaluation_loss"], rel=1e-12)


def test_a_repeatable_iterable_is_not_started_before_its_pass(capsys: Any) -> None:
    trainer = make(callbacks=())
    trainer.train(Again(), 2)
    line = "The Again is treated as an iterable of batches, not of samples\n"
    assert capsys.readouterr().out == line
    assert trainer.run_state.updates == 6


@pytest.mark.parametrize(
    "sample",
    [
        (torch.zeros(3).double(), torch.tensor(1.0).double()),
        [torch.zeros(3).double(), 1.0],
        (torch.zeros(3).double(), np.float32(1), "more"),
    ],
    ids=["tensors", "numbers", "numpy"],
)
def test_a_generator_of_samples_is_warned_of(sample: Any) -> None:
    class Loss(Trainer):
        def calculate_train_batch_loss(self, batch: Any) -> dict[str, Any]:
            return {"loss": self.model(batch[0]).mean(), "model_outputs": None, "batch_size": 1}

    with pytest.warns(UserWarning, match=r"looks like one sample: .* \[3\], \[\].*IterableDataset"):
        make(Loss, callbacks=()).train((sample for _ in range(2)), 1)


def test_a_loader_of_torch_needs_no_words(capsys: Any) -> None:
    make(callbacks=()).train(DataLoader(ROWS, 4), 1)
    assert capsys.readouterr().out == ""
