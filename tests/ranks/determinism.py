"""Runs under torchrun: ranks agree on everything random, and ranks with different data are refused."""

import os
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset, random_split

from pytorch_accelerated import Trainer, set_seed
from pytorch_accelerated.errors import DataError
from tests.support.reference import regression_data, sgd, tiny_model
from tests.training.test_determinism import digest, train_randomly

RANKS = int(os.environ["WORLD_SIZE"])


def make_trainer(seed: int | None = None) -> Trainer:
    trainer = Trainer(model := tiny_model(), nn.MSELoss(), sgd(model), callbacks=(), seed=seed)
    assert trainer._ranks.count == RANKS > 1
    return trainer


class Rows(Dataset[Any]):
    """A user's own dataset over a list of rows, with noise of a generator of its own if there is one."""

    def __init__(self, rows: list[Any], noise: np.random.Generator | None = None) -> None:
        self.rows = rows
        self.noise = noise

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        inputs, targets = self.rows[index]
        return (inputs if self.noise is None else inputs + self.noise.random()), targets


class Augmented(Rows):
    """Noise comes from the generators that the library seeds."""

    def __getitem__(self, index: int) -> Any:
        inputs, targets = self.rows[index]
        return inputs + np.random.rand() + random.random() + torch.rand(1), targets


class ByName(Rows):
    """Rows that have names, not numbers."""

    def __getitem__(self, name: Any) -> Any:
        return super().__getitem__({"first": 0, "second": 1}[name])


# Without a seed, the first rank's generator decides for all, and no rank's changes.
trainer = make_trainer()
rank = trainer._ranks.index
torch.manual_seed(100 + rank)
state = torch.get_rng_state()
trainer.train(regression_data(8), 1, regression_data(5))
assert torch.equal(torch.get_rng_state(), state)
seed = trainer.run_config.seed
assert trainer._ranks.exchange(seed) == [seed] * RANKS
torch.manual_seed(100)
again = make_trainer()
again.train(regression_data(8), 1)
assert again.run_config.seed == seed

# The number of workers changes no bit, and all ranks end with the same weights, though each has dropout of its own.
runs = [train_randomly(3, workers=workers) for workers in (0, 2)]
assert digest(runs[0]) == digest(runs[1])
assert len(set(trainer._ranks.exchange(digest(runs[0])))) == 1, "ranks have different weights"


class Seen(Trainer):
    """Keeps the first number of each row that this rank trains on."""

    def calculate_train_batch_loss(self, batch: Any) -> dict[str, Any]:
        self.rows: list[float] = [*getattr(self, "rows", []), *batch[0][:, 0].tolist()]
        return super().calculate_train_batch_loss(batch)


# The first rank's generator decides on the order, where the user gives each rank one of its own.
numbers, orders = regression_data(12), []
for own in (torch.Generator().manual_seed(rank), torch.Generator().manual_seed(rank + 100)):
    seen = Seen(model := tiny_model(), nn.MSELoss(), sgd(model), callbacks=())
    seen.train(DataLoader(TensorDataset(*numbers), 2, shuffle=True, generator=own), 1)
    everyones = [row for rows in trainer._ranks.exchange(seen.rows) for row in rows]
    assert sorted(everyones) == sorted(numbers[0][:, 0].tolist())
    orders.append(everyones)
assert orders[0] != orders[1]

# A split that every rank has drawn for itself.
data = TensorDataset(*regression_data(40))
torch.manual_seed(rank)
train_set, eval_set = random_split(data, [30, 10])
for use in (
    lambda trainer: trainer.train(train_set, 1),
    lambda trainer: trainer.train(data, 1, eval_set),
    lambda trainer: trainer.evaluate(eval_set),
    lambda trainer: trainer.predict(eval_set),
):
    with pytest.raises(DataError, match=r"different datasets.*call `set_seed\(...\)` before the split"):
        use(make_trainer())
with pytest.raises(DataError, match="different datasets"):
    make_trainer().train(TensorDataset(*regression_data(8 + rank)), 1)
# Nobody sees the indices of one that was copied, so the rows themselves are looked at.
split: Any = train_set
rows = list(split)
for copied in (rows, TensorDataset(*map(torch.stack, zip(*rows, strict=True))), Rows(rows)):
    for workers in (0, 1):
        with pytest.raises(DataError, match=r"rows with other contents.*call `set_seed\(...\)`"):
            make_trainer().train(copied, 1, train_dataloader_kwargs={"num_workers": workers})
# Rows that are random, or can't be fetched by number, are no reason to refuse anything.
rows = [data[index] for index in range(len(data))]
make_trainer().train(Rows(rows, noise=np.random.default_rng(rank)), 1)
make_trainer().train(Augmented(rows), 1)
make_trainer().train(ByName(rows), 1, train_dataloader_kwargs={"sampler": ["first", "second"]})
set_seed(1)
train_set, eval_set = random_split(data, [30, 10])
make_trainer().train(train_set, 1, eval_set)

print("done")
