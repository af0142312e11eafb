"""Runs on mixtures, on batches by tokens, and up to a number of samples, for any number of ranks."""

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pytorch_accelerated import Trainer
from pytorch_accelerated.data import Mixture, TokenBatches
from pytorch_accelerated.facts.seeding import mixed_seed, with_seed
from tests.support.resuming import SaveAndStop, assert_same
from tests.support.rows import (
    ROWS,
    SEED,
    LoggingData,
    check_rows_equal_the_log,
    train,
    trainer_of,
)

LENGTHS = [3 + row * 7 % 19 for row in range(ROWS)]
MAX_TOKENS = 48


class LoggingMixture(Mixture):
    """Three datasets; `log` has the indices that were fetched. The second is used up within an epoch."""

    def __init__(self, rows: int | None = 31) -> None:
        super().__init__([LoggingData(19), LoggingData(4), LoggingData(9)], [0.5, 0.2, 0.3], rows=rows)
        self.log: list[int] = []

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        self.log.extend(indices)
        return super().__getitems__(indices)


class CountingTrainer(Trainer):
    """An item is a positive number of the inputs."""

    def count_batch_items(self, batch: Any) -> int:
        return int((batch[0] > 0).sum())


def token_batches(epoch: int) -> list[list[int]]:
    """The batches of an epoch by tokens, in a run."""
    return with_seed(mixed_seed("sampler", SEED, epoch), list, TokenBatches(LENGTHS, MAX_TOKENS))


def counting(*callbacks: Any, **arguments: Any) -> Trainer:
    """A run that ends after 50 items, within its second epoch."""
    plain = trainer_of()
    trainer = CountingTrainer(plain.model, plain.loss_func, plain.optimizer, callbacks=callbacks, seed=SEED)
    trainer.train(LoggingData(), None, per_device_batch_size=2, max_tokens=50, **arguments)
    return trainer


def mixed(*callbacks: Any, **arguments: Any) -> Trainer:
    """A run on a mixture that ends after 50 samples, within its second epoch."""
    trainer = trainer_of(*callbacks)
    arguments = {"per_device_batch_size": 2, "gradient_accumulation_steps": 2, **arguments}
    trainer.train(LoggingMixture(), None, max_samples=50, **arguments)
    return trainer


def by_tokens(*callbacks: Any, **arguments: Any) -> Trainer:
    """Two epochs of batches by tokens."""
    kwargs = {"batch_sampler": TokenBatches(LENGTHS, MAX_TOKENS), **arguments.pop("train_dataloader_kwargs", {})}
    return train(*callbacks, num_epochs=2, train_dataloader_kwargs=kwargs, **arguments)


def check_on_ranks() -> None:
    """Each world size trains on the rows that the orders say, and on no others."""
    for epochs, arguments in ((3, {}), (3, {"gradient_accumulation_steps": 3}), (2, {"num_epochs": 2})):
        data = LoggingMixture()
        updates = check_rows_equal_the_log("the trainer", data, **arguments)
        trainer = trainer_of()
        arguments = {"num_epochs": 3, "per_device_batch_size": 4, **arguments}
        rows = [trainer.rows_of(update, data, **arguments) for update in range(1, updates + 1)]
        orders = [data.order(seed=SEED, epoch=epoch).tolist() for epoch in range(epochs)]
        assert list(itertools.chain(*rows)) == list(itertools.chain(*orders))
    check_batches_by_tokens()
    check_limit_of_samples()


def check_batches_by_tokens() -> None:
    """The ranks have the batches of the sampler in turn."""
    trainer = by_tokens()
    index, ranks = trainer._ranks.index, trainer._ranks.count
    epochs = [token_batches(epoch) for epoch in range(2)]
    rounds = [batches[start : start + ranks] for batches in epochs for start in range(0, len(batches), ranks)]
    assert trainer.run_state.updates == len(rounds)
    assert [trainer.rows_of(update) for update in range(1, len(rounds) + 1)] == [sum(each, []) for each in rounds]
    assert trainer.run_state.batches_in_epoch == len(epochs[1][index::ranks])


def check_limit_of_samples() -> None:
    """The run ends with the update that reaches the samples, as its plan and its schedule know from the start."""
    trainer = mixed()
    state, per_update = trainer.run_state, 4 * trainer._ranks.count
    in_epoch = -(-31 // per_update)
    assert state.updates == trainer.run_config.max_num_train_steps == in_epoch + -(-19 // per_update)
    assert state.samples == 31 + min(31, -(-19 // per_update) * per_update)


def check_every_resume(run: Any, folder: Path, whole: Trainer, between: int = 1) -> None:
    """A run that was stopped after any update, or some of them, ends like one that was not.

    gloo adds the gradients of three ranks in an order that is not always the same.
    """
    tolerance = 1e-12 if whole._ranks.count > 2 else 0.0
    for stop in range(1, whole.run_state.updates, between):
        run(SaveAndStop(folder / str(stop), stop))
        resumed = run(resume_from=folder / str(stop))
        assert resumed.run_state == whole.run_state
        assert_same(resumed.model.state_dict(), whole.model.state_dict(), tolerance=tolerance)
