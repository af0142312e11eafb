"""A run that resumes with other rows says so, and the order of its rows is that of the run that was saved."""

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import (
    DataLoader,
    Dataset,
    RandomSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    random_split,
)

from pytorch_accelerated import Trainer
from pytorch_accelerated.callbacks import SaveTrainingStateCallback
from tests.support.reference import assert_same_parameters, regression_data, sgd, tiny_model
from tests.support.resuming import SaveAndStop

DATA = TensorDataset(*regression_data(40))


class Order(Trainer):
    """Remembers which rows each batch had: the input of a row is as good as its name."""

    def __init__(self, *callbacks: Any, seed: int | None = None) -> None:
        super().__init__(model := tiny_model(), nn.MSELoss(), sgd(model), callbacks=callbacks, seed=seed)
        self.rows: list[float] = []

    def calculate_train_batch_loss(self, batch: Any) -> dict[str, Any]:
        self.rows += batch[0][:, 0].tolist()
        return super().calculate_train_batch_loss(batch)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# ------------------------------------------------------------------------------------------------ the same rows or not


def run_on(folder: Path, train_rows: Any, eval_rows: Any = None, *, resumes: bool = False, workers: int = 0) -> Trainer:
    trainer = Order(*(() if resumes else (SaveAndStop(folder, 2),)), seed=1)
    trainer.train(
        train_rows,
        2,
        eval_rows,
        4,
        resume_from=folder if resumes else None,
        train_dataloader_kwargs={"num_workers": workers},
    )
    return trainer


def split(seed: int) -> list[Any]:
    return random_split(DATA, [30, 10], generator=generator(seed))


def listed(parts: list[Any]) -> list[Any]:
    return [list(part) for part in parts]


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("copied", [lambda parts: parts, listed], ids=["subsets", "lists"])
def test_a_new_split_in_a_resumed_run_brings_a_warning(copied: Any, workers: int, tmp_path: Path) -> None:
    run_on(tmp_path, *copied(split(1)), workers=workers)
    run_on(tmp_path, *copied(split(1)), resumes=True, workers=workers)  # without one: every warning is an error here
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run_on(tmp_path, *copied(split(2)), resumes=True, workers=workers)
    said = [str(warning.message) for warning in caught if warning.category is UserWarning]  # Python has its own
    assert [next(word for word in ("training", "evaluation") if f"its {word} data" in text) for text in said] == [
        "training",
        "evaluation",
    ]
    assert all("set_seed" in text and "with the seed of the first run" in text for text in said)


def test_rows_more_or_fewer_are_warned_of_and_a_set_that_is_new_is_not(tmp_path: Path) -> None:
    run_on(tmp_path, DATA)
    with pytest.warns(UserWarning, match="training data.*has 39 rows instead of 40"):
        run_on(tmp_path, Subset(DATA, range(39)), Subset(DATA, range(9)), resumes=True)


@pytest.mark.parametrize("changed", ["clean", "noisy"])
def test_a_change_of_any_evaluation_set_is_warned_of_by_its_name(changed: str, tmp_path: Path) -> None:
    sets: dict[str, Any] = {"clean": Subset(DATA, range(9)), "noisy": Subset(DATA, range(9, 20))}
    run_on(tmp_path, DATA, sets)
    run_on(tmp_path, DATA, dict(reversed(sets.items())), resumes=True)  # every warning is an error here
    with pytest.warns(UserWarning, match="evaluation .'" + changed + "'. data has changed") as caught:
        run_on(tmp_path, DATA, {**sets, changed: Subset(DATA, range(20, 25)), "new": DATA}, resumes=True)
    assert len(caught) == 1


class OwnNoise(Dataset[Any]):
    """Draws from a generator that nobody else knows."""

    def __init__(self) -> None:
        self.noise = np.random.default_rng()

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Any:
        return torch.tensor([self.noise.random(), 1.0, index]).double(), torch.zeros(2).double()


def test_rows_that_are_never_twice_the_same_are_not_warned_of(tmp_path: Path) -> None:
    run_on(tmp_path, OwnNoise(), OwnNoise())
    run_on(tmp_path, OwnNoise(), OwnNoise(), resumes=True)


def test_rows_are_fetched_for_comparison_only_where_states_are_saved(tmp_path: Path) -> None:
    class Counted(TensorDataset):
        asked = 0

        def __getitem__(self, index: Any) -> Any:
            self.asked += 1
            return super().__getitem__(index)

    without, saved = Counted(*regression_data(8)), Counted(*regression_data(8))
    Order().train(without, 1)
    assert without.asked == 8
    Order(SaveTrainingStateCallback(tmp_path, save_every_n_epochs=1)).train(saved, 1)
    assert saved.asked == 8 + 2 * 3


# ------------------------------------------------------------------------------------- a generator of the user's own

OWN_GENERATOR: dict[str, Any] = {
    "loader": lambda own: DataLoader(DATA, 4, shuffle=True, generator=own),
    "random sampler": lambda own: DataLoader(DATA, 4, sampler=RandomSampler(DATA, generator=own)),
    "with replacement": lambda own: DataLoader(DATA, 4, sampler=RandomSampler(DATA, True, 20, generator=own)),
    "weighted": lambda own: DataLoader(DATA, 4, sampler=WeightedRandomSampler([1.0] * 40, 20, generator=own)),
    "subset": lambda own: DataLoader(DATA, 4, sampler=SubsetRandomSampler(range(24), generator=own)),
    "keyword": lambda own: own,
}


def ordered(make: Any, own: torch.Generator, *callbacks: Any, seed: int | None = None, **kwargs: Any) -> Order:
    trainer, loader = Order(*callbacks, seed=seed), make(own)
    if loader is own:
        trainer.train(DATA, 2, None, 4, train_dataloader_kwargs={"generator": own}, **kwargs)
    else:
        trainer.train(loader, 2, **kwargs)
    return trainer


@pytest.mark.parametrize("make", OWN_GENERATOR.values(), ids=OWN_GENERATOR)
def test_a_generator_of_the_users_own_decides_on_the_order(make: Any) -> None:
    torch.manual_seed(1)
    first = ordered(make, own := generator(5))
    torch.manual_seed(2)
    assert ordered(make, generator(5), seed=8).rows == first.rows  # whatever other seeds there are
    assert ordered(make, generator(6)).rows != first.rows
    assert ordered(make, own).rows != first.rows  # it has moved on, as it does with torch
    assert ordered(make, own.manual_seed(5)).rows == first.rows
    epochs = first.rows[: len(first.rows) // 2], first.rows[len(first.rows) // 2 :]
    assert epochs[0] != epochs[1]


@pytest.mark.parametrize("updates", [2, 7])
@pytest.mark.parametrize("make", OWN_GENERATOR.values(), ids=OWN_GENERATOR)
def test_a_resumed_run_keeps_the_order_of_the_generator_that_it_began_with(
    make: Any, updates: int, tmp_path: Path
) -> None:
    whole = ordered(make, generator(5))
    saved = ordered(make, generator(5), SaveAndStop(tmp_path / "state", updates))
    resumed = ordered(make, generator(77), resume_from=tmp_path / "state")
    assert [*saved.rows, *resumed.rows] == whole.rows
    assert_same_parameters(resumed.model, whole.model)


def test_batches_of_rows_whose_bytes_are_no_round_number_have_the_same_bits_after_a_resume(tmp_path: Path) -> None:
    # The bits of a product depend on the address of its factors: batches of 3 rows of 40 bytes begin anywhere.
    inputs = torch.randn(96, 10, generator=generator(0))

    def trained(*callbacks: Any, resume_from: Path | None = None) -> nn.Module:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(10, 16), nn.ReLU(), nn.Linear(16, 1))
        trainer = Trainer(model, nn.MSELoss(), torch.optim.SGD(model.parameters(), lr=0.05), callbacks, seed=1)
        trainer.train((inputs, inputs[:, :1]), 2, None, 3, resume_from=resume_from)
        return model

    class Addresses(SaveAndStop):
        def on_train_step_end(self, trainer: Trainer, batch: Any, **kwargs: Any) -> None:
            assert [each.data_ptr() % 64 for each in batch] == [0, 0]

    trained(Addresses(tmp_path, 37))
    assert_same_parameters(trained(resume_from=tmp_path), trained(), tolerance=0)
