"""Runs under torchrun: ranks agree on everything random, and ranks with different data are refused."""

import os

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset, random_split

from pytorch_accelerated import Trainer, set_seed
from pytorch_accelerated.errors import DataError
from tests.support.randomness import digest, train_randomly
from tests.support.reference import regression_data, sgd, tiny_model

RANKS = int(os.environ["WORLD_SIZE"])


def make_trainer(seed: int | None = None) -> Trainer:
    trainer = Trainer(model := tiny_model(), nn.MSELoss(), sgd(model), callbacks=(), seed=seed)
    assert trainer._ranks.count == RANKS > 1
    return trainer


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
set_seed(1)
train_set, eval_set = random_split(data, [30, 10])
make_trainer().train(train_set, 1, eval_set)

print("done")
