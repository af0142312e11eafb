"""Runs whose rows are known twice: from a log that the dataset writes itself, and from orders made by hand."""

import random
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset, Sampler, WeightedRandomSampler

from pytorch_accelerated import Trainer
from pytorch_accelerated.callbacks import TrainerCallback
from pytorch_accelerated.data.sampling import epoch_order
from tests.support.reference import regression_data

ROWS, SEED = 23, 5


class LoggingData(Dataset[Any]):
    """Rows with noise of all three generators that user code draws from; `log` has the indices that were fetched."""

    def __init__(self, size: int = ROWS) -> None:
        self.inputs, self.targets = regression_data(size)
        self.log: list[int] = []

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: Any) -> Any:
        self.log.append(int(index))
        noise = torch.rand(3, dtype=torch.float64) + np.random.rand() + random.random()
        return self.inputs[index] + 0.1 * noise, self.targets[index]


class LogOfUpdates(TrainerCallback):
    """Divides the log of the dataset into updates, and these into batches."""

    def __init__(self) -> None:
        self.updates: list[list[list[int]]] = [[]]

    def on_training_run_start(self, trainer: Trainer, **kwargs: Any) -> None:
        trainer.train_dataset.log.clear()  # of its fingerprint

    def on_eval_epoch_end(self, trainer: Trainer, **kwargs: Any) -> None:
        trainer.train_dataset.log.clear()  # `overfit_batches` evaluates on the same data

    def on_train_step_start(self, trainer: Trainer, **kwargs: Any) -> None:
        if trainer.run_state.updates == len(self.updates):
            self.updates.append([])
        self.updates[-1].append(list(trainer.train_dataset.log))
        trainer.train_dataset.log.clear()


class Batches:
    """A batch sampler with other batches in each epoch: 6 or 12 of them, of 2 to 4 rows."""

    def __init__(self, seed: int = 0) -> None:
        self.generator, self.epoch = np.random.default_rng(seed), 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[list[int]]:
        order = np.random.default_rng(self.epoch).permutation(ROWS)
        yield from (part.tolist() for part in np.array_split(order, 12 if self.epoch == 1 else 6))

    def __len__(self) -> int:
        return 6


class GivenOrders(Sampler[int]):
    """The orders of epochs, as they are."""

    def __init__(self, orders: Sequence[Sequence[int]]) -> None:
        self.orders, self.epoch = orders, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.orders[self.epoch])

    def __iter__(self) -> Iterator[int]:
        return iter(self.orders[self.epoch])


class GivenBatches(GivenOrders):
    """The batches of epochs, as they are."""


def trainer_of(*callbacks: Any, seed: int | None = SEED) -> Trainer:
    """A trainer of a network with dropout."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 6), nn.Dropout(0.3), nn.Tanh(), nn.Linear(6, 2)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return Trainer(model, nn.MSELoss(), optimizer, callbacks=callbacks, seed=seed)


def loaders() -> dict[str, dict[str, Any]]:
    """Arguments of `train` by what decides about the order."""

    def weighted() -> WeightedRandomSampler:
        generator = torch.Generator().manual_seed(3)
        return WeightedRandomSampler(list(range(1, ROWS + 1)), 22, generator=generator)

    by_loader: dict[str, dict[str, Any]] = {
        "the trainer": {},
        "nothing": {"shuffle": False},
        "a generator": {"generator": torch.Generator().manual_seed(8)},
        "weights": {"sampler": weighted()},
        "batches": {"batch_sampler": Batches()},
        "drop_last": {"drop_last": True},
    }
    found = {name: {"train_dataloader_kwargs": {"num_workers": 0, **kwargs}} for name, kwargs in by_loader.items()}
    return {
        **found,
        "accumulation": {**found["the trainer"], "gradient_accumulation_steps": 2},
        "few batches": {**found["the trainer"], "overfit_batches": 2},
        "a limit": {**found["the trainer"], "num_epochs": None, "max_num_train_steps": 7},
    }


def check_rows_equal_the_log(name: str, data: Any = None, **further: Any) -> int:
    """Train for three epochs, and compare what `rows_of` and `updates_of` say with what was fetched.

    Returns:
        The number of updates.
    """
    arguments: dict[str, Any] = {"num_epochs": 3, "per_device_batch_size": 4, **loaders()[name], **further}
    trainer, data = trainer_of(log := LogOfUpdates()), LoggingData() if data is None else data
    in_advance = [trainer.rows_of(update, data, **arguments) for update in (1, 2, 3)]
    assert trainer.train_dataset is None
    trainer.train(data, **arguments)
    updates = trainer.run_state.updates
    per_rank = trainer._ranks.exchange(log.updates)
    assert {len(logged) for logged in per_rank} == {updates}
    logged = [
        [row for batches in zip(*per_batch, strict=True) for batch in batches for row in batch]
        for per_batch in zip(*per_rank, strict=True)
    ]
    rows = [trainer.rows_of(update) for update in range(1, updates + 1)]
    assert rows == logged
    assert in_advance == rows[:3]
    for row in (0, 9, 22):
        assert trainer.updates_of(row) == [update for update, each in enumerate(rows, start=1) if row in each]
    return updates


def order_of(epoch: int) -> list[int]:
    """The order of an epoch of `LoggingData` that the trainer decides about."""
    return epoch_order(ROWS, seed=SEED, epoch=epoch).tolist()


def without(order: Sequence[int], rows: Sequence[int], start: int = 0) -> list[int]:
    """An order without rows from a position on."""
    return [*order[:start], *(row for row in order[start:] if row not in rows)]


def train(*callbacks: Any, **arguments: Any) -> Trainer:
    """Three epochs over `LoggingData`."""
    trainer = trainer_of(*callbacks)
    trainer.train(LoggingData(), **{"num_epochs": 3, "per_device_batch_size": 4, **arguments})
    return trainer


def train_in_order(orders: Sequence[Sequence[int]], **arguments: Any) -> Trainer:
    """The same with orders made by hand."""
    kwargs: Mapping[str, Any] = arguments.pop("train_dataloader_kwargs", {})
    return train(**arguments, train_dataloader_kwargs={**kwargs, "sampler": GivenOrders(orders)})


def check_leaving_out_on_ranks(folder: Path) -> None:
    """Rows are left out from the start, and rows and an update from a state on, as if the order had been another."""
    from tests.support.resuming import SaveAndStop, assert_same

    rows = [2, 3, 11]
    actual = train(leave_out={"rows": rows})
    expected = train_in_order([without(order_of(epoch), rows) for epoch in range(3)])
    assert_same(actual.model.state_dict(), expected.model.state_dict())
    ranks = actual._ranks.count
    stop, size = 4 // ranks, 4 * ranks  # updates until the state, samples of an update
    updates = -(-ROWS // size)
    train(SaveAndStop(folder / "state", stop))
    left_out = {"rows": rows, "updates": [stop + 1, updates + 2]}
    actual = train(leave_out=left_out, resume_from=folder / "state")
    orders = [order_of(epoch) for epoch in range(3)]
    del orders[1][size : 2 * size], orders[0][stop * size : (stop + 1) * size]
    orders = [without(order, rows, 0 if epoch else stop * size) for epoch, order in enumerate(orders)]
    expected = train_in_order(orders)
    assert_same(actual.model.state_dict(), expected.model.state_dict())
