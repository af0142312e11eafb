"""Runs under torchrun: all ranks together use each sample or batch of any iterable exactly once."""

import itertools
import math
import os
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from datasets import IterableDataset as HubStream
from datasets.distributed import split_dataset_by_node
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    TensorDataset,
)

from pytorch_accelerated import Trainer
from pytorch_accelerated.callbacks import TrainerCallback
from pytorch_accelerated.errors import ConfigurationError, DataError
from tests.chaos.size import some
from tests.support.reference import (
    TOLERANCE,
    assert_same_numbers,
    assert_same_parameters,
    regression_data,
    sgd,
    tiny_model,
    train_reference,
)

RANKS = int(os.environ["WORLD_SIZE"])
SIZE = 23
STEPS = some((3,), (1, 2, 3))
DATA = regression_data(SIZE)


class Seen(TrainerCallback):
    """The rows of the batches that this rank was shown, told by their position in the data."""

    def __init__(self) -> None:
        self.trained: list[list[int]] = []
        self.evaluated: list[list[int]] = []

    def on_train_step_end(self, trainer: Trainer, batch: Any, **kwargs: Any) -> None:
        self.trained.append(positions(batch))

    def on_eval_step_end(self, trainer: Trainer, batch: Any, **kwargs: Any) -> None:
        self.evaluated.append(positions(batch))


def positions(batch: Any) -> list[int]:
    return [int((DATA[0] == row).all(1).nonzero()) for row in batch[0]]


def flat(batches: Any) -> list[int]:
    return list(itertools.chain.from_iterable(batches))


def trainer_of(*callbacks: Any, base: type[Trainer] = Trainer) -> Trainer:
    trainer = base(model := tiny_model(), nn.MSELoss(), sgd(model), callbacks=callbacks, seed=3)
    assert trainer._ranks.count == RANKS > 1
    return trainer


RANK = trainer_of()._ranks.index


class Samples(IterableDataset[Any]):
    """The samples of a stream that every rank reads in the same order."""

    def __init__(self, size: int = SIZE) -> None:
        self.size = size

    def __iter__(self) -> Iterator[Any]:
        return zip(DATA[0][: self.size], DATA[1][: self.size], strict=True)


class SizedSamples(Samples):
    def __len__(self) -> int:
        return self.size


class OwnSamples(Samples):
    """A stream that gives each rank samples of its own, and not equally many."""

    def __iter__(self) -> Iterator[Any]:
        return ((DATA[0][index], DATA[1][index]) for index in flat(batches_of_rank(RANK)))


def batches_of_rank(rank: int) -> list[list[int]]:
    """What a rank has of its own: later ranks have less."""
    return [batch.tolist() for batch in torch.arange(rank * 8, min(SIZE, rank * 8 + 7 - 2 * rank)).split(2)]


def updates_of(shares: list[list[list[int]]], steps: int) -> list[torch.Tensor]:
    """The samples of each update, where every rank takes the next `steps` of its batches."""
    count = max(map(len, shares))
    return [
        torch.tensor(flat(batch for share in shares for batch in share[first : first + steps]))
        for first in range(0, count, steps)
    ]


def check(make: Any, shares: list[list[list[int]]], *, steps: int = 1, epochs: int = 1, **kwargs: Any) -> None:
    """Train and evaluate on what `make` returns; this rank must see its share, and the weights must be exact."""
    trainer = trainer_of(seen := Seen())
    history = trainer.train(
        make(),
        epochs,
        make(),
        per_device_batch_size=2,
        gradient_accumulation_steps=steps,
        train_dataloader_kwargs=kwargs,
        eval_dataloader_kwargs=kwargs,
    )
    assert seen.trained == seen.evaluated == shares[RANK] * epochs, (seen.trained, shares[RANK])
    expected, _ = train_reference(DATA, updates_of(shares, steps) * epochs)
    assert_same_parameters(trainer.model, expected)
    used = flat(flat(shares))
    with torch.no_grad():
        loss = nn.functional.mse_loss(expected(DATA[0][used]), DATA[1][used]).item()
    assert math.isclose(history.get_latest_metric("eval_loss_epoch"), loss, rel_tol=TOLERANCE)
    assert trainer.run_state.updates == epochs * len(updates_of(shares, steps))
    # Predictions come in the order of the rounds, as far as a stream has an order at all.
    rounds = flat(itertools.zip_longest(*shares, fillvalue=[]))
    with torch.no_grad():
        outputs = expected(DATA[0][flat(rounds)])
    assert_same_numbers(trainer.predict(make(), 2, kwargs), outputs, tolerance=TOLERANCE)


def shares_of(batches: list[list[int]]) -> list[list[list[int]]]:
    """Batches dealt to the ranks one after the other."""
    return [batches[rank::RANKS] for rank in range(RANKS)]


PAIRS = [list(range(start, min(start + 2, SIZE))) for start in range(0, SIZE, 2)]

# ---------------------------------------------------------------------------------------------------------- streams

for steps in STEPS:
    check(Samples, shares_of(PAIRS), steps=steps)
    check(OwnSamples, [batches_of_rank(rank) for rank in range(RANKS)], steps=steps, is_sharded=True)
check(SizedSamples, shares_of(PAIRS), epochs=2)
check(lambda: DataLoader(Samples(), 2), shares_of(PAIRS))
check(lambda: Samples(2 * RANKS), shares_of(PAIRS[:RANKS]))
check(lambda: Samples(2 * RANKS + 1), shares_of([*PAIRS[:RANKS], [2 * RANKS]]), steps=2)  # one rank has a sample more

# Streams of libraries that divide by rank are taken as such without a word.
OfLitdata = type("OfLitdata", (OwnSamples,), {"__module__": "litdata.streaming.dataset"})
check(OfLitdata, [batches_of_rank(rank) for rank in range(RANKS)])

# So are streams that `datasets` has divided, for as many ranks as there are.


def hub_rows(shards: list[int]) -> Iterator[dict[str, Any]]:
    for rank in shards:
        yield from (
            {"inputs": DATA[0][row].tolist(), "targets": DATA[1][row].tolist()} for row in flat(batches_of_rank(rank))
        )


def divided(index: int = RANK, count: int = RANKS) -> Any:
    stream = HubStream.from_generator(hub_rows, gen_kwargs={"shards": list(range(RANKS))})
    return split_dataset_by_node(stream, index, count)


def as_pair(rows: list[dict[str, Any]]) -> tuple[torch.Tensor, ...]:
    return tuple(torch.tensor([row[name] for row in rows], dtype=torch.float64) for name in ("inputs", "targets"))


check(divided, [batches_of_rank(rank) for rank in range(RANKS)], collate_fn=as_pair)
with pytest.raises(ConfigurationError, match=rf"divided the stream for {RANKS + 1} processes, but there are {RANKS}"):
    check(lambda: divided(count=RANKS + 1), PAIRS, collate_fn=as_pair)  # type: ignore[arg-type]

# Batches of each rank's own. Without a word about it, the first rank warns.
own = [batches_of_rank(rank) for rank in range(RANKS)]
is_sharded = {"is_sharded": True}


class OwnBatches:
    def __iter__(self) -> Iterator[Any]:
        return ((DATA[0][batch], DATA[1][batch]) for batch in own[RANK])


with warnings.catch_warnings():
    warnings.simplefilter("error")
    check(OwnBatches, own, steps=2, is_sharded=True)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    check(OwnBatches, own)
assert ["used as it is on each" in str(warning.message) for warning in caught] == [True] * (3 if RANK == 0 else 0)

# Batches that are in memory already: as before, but one message is enough for many.


class Listed(OwnBatches):
    """A list on the ranks in `where`, something else on the others."""

    def __init__(self, *where: int, batches: list[Any] | None = None) -> None:
        self.where = where
        self.batches = list(super().__iter__()) if batches is None else batches

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches) if RANK in self.where else (batch for batch in self.batches)


EVERYWHERE = range(RANKS)
for steps in STEPS:
    check(lambda: Listed(*EVERYWHERE), own, steps=steps, epochs=2, is_sharded=True)
    check(lambda: Listed(0), own, steps=steps, epochs=2, is_sharded=True)
with_empty = [(rows[:0], targets[:0]) for rows, targets in Listed().batches[:1]]
check(lambda: Listed(*EVERYWHERE, batches=[*with_empty, *Listed().batches, *with_empty]), own, is_sharded=True)
tuples = tuple(Listed().batches)
check(lambda: Listed(*EVERYWHERE, batches=tuples), own, is_sharded=True)  # type: ignore[arg-type]

# Batches whose size nobody can tell: the mean over the batches of the ranks, weighed by what the hook says.


class Opaque:
    def __init__(self, rows: list[int]) -> None:
        self.rows = rows


class OpaqueTrainer(Trainer):
    def calculate_train_batch_loss(self, batch: Any) -> dict[str, Any]:
        return super().calculate_train_batch_loss((DATA[0][batch.rows], DATA[1][batch.rows]))


for steps in STEPS:
    trainer = trainer_of(base=OpaqueTrainer)
    opaque: Any = map(Opaque, own[RANK])
    trainer.train(opaque, 1, gradient_accumulation_steps=steps, train_dataloader_kwargs=is_sharded)
    expected, _ = train_reference(DATA, updates_of(own, steps))
    assert_same_parameters(trainer.model, expected)

# A rank that has nothing at all is an error on all.
for nothing_on in range(RANKS):
    batches = [] if nothing_on == RANK else [(DATA[0][:2], DATA[1][:2])]
    with pytest.raises(DataError, match=r"At least one rank got no batch at all.*\(by rank: .*0.*\)"):
        trainer_of().train(iter(batches), 1, train_dataloader_kwargs=is_sharded)
    # To evaluate, it needs nothing.
    metrics = trainer_of().evaluate(iter(batches), dataloader_kwargs=is_sharded)
    with torch.no_grad():
        loss = nn.functional.mse_loss(tiny_model()(DATA[0][:2]), DATA[1][:2]).item()
    assert math.isclose(metrics["evaluation_loss"], loss, rel_tol=TOLERANCE)
with pytest.raises(DataError, match="There is nothing to train on"):
    trainer_of().train(iter([]), 1, train_dataloader_kwargs=is_sharded)
with pytest.raises(DataError, match="At least one rank got no batch at all"):
    trainer_of().train(Samples(2), 1, per_device_batch_size=2)  # less than a global batch

# ------------------------------------------------------------------------------------------------ samplers of all kinds

DATASET = TensorDataset(*DATA)


def loader(**kwargs: Any) -> Any:
    return lambda: DataLoader(DATASET, **kwargs)


check(loader(batch_sampler=PAIRS), shares_of(PAIRS))
check(loader(batch_sampler=PAIRS), shares_of(PAIRS), steps=2, epochs=2)
check(loader(batch_sampler=BatchSampler(list(range(SIZE)), 2, False)), shares_of(PAIRS), steps=3)  # type: ignore[arg-type]
check(loader(batch_sampler=[[1, 2, 3], [4], [], [5, 6]]), shares_of([[1, 2, 3], [4], [5, 6]]))


class Shared(DistributedSampler[Any]):
    """A sampler of this rank's share; without padding, so that the first ranks may have more."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.rank, SIZE, self.num_replicas))

    def __len__(self) -> int:
        return len(range(self.rank, SIZE, self.num_replicas))


mine = [list(range(rank, SIZE, RANKS)) for rank in range(RANKS)]
in_pairs = [[share[start : start + 2] for start in range(0, len(share), 2)] for share in mine]
sampler = Shared(DATASET, RANKS, RANK)
for steps in (1, 2):
    check(loader(sampler=sampler, batch_size=2), in_pairs, steps=steps)
    check(loader(batch_sampler=BatchSampler(sampler, 2, False)), in_pairs, steps=steps)
    # One rank has whole batches less than another.
    singles = [[[index] for index in share] for share in mine]
    check(loader(sampler=sampler, batch_size=1), singles, steps=steps)

# What torch pads is used as it is.
trainer = trainer_of(seen := Seen())
trainer.train(DATASET, 2, None, 2, train_dataloader_kwargs={"sampler": DistributedSampler(DATASET, RANKS, RANK)})
everyones = trainer._ranks.exchange(flat(seen.trained))
padded = -(-SIZE // RANKS) * RANKS
assert len(flat(everyones)) == 2 * padded
assert set(flat(share[: padded // RANKS] for share in everyones)) == set(range(SIZE))
assert seen.trained[: len(seen.trained) // 2] != seen.trained[len(seen.trained) // 2 :], "the sampler hears of epochs"

print("done")
