"""What a run measures within its epochs: every update in one record, whatever the run goes through."""

import functools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pytorch_accelerated import Trainer
from pytorch_accelerated.callbacks import TrainerCallback
from pytorch_accelerated.errors import StopTrainingError
from pytorch_accelerated.tracking import RunHistory, StepRecord
from tests.chaos.size import in_release
from tests.support.processes import run_on_ranks
from tests.support.reference import TOLERANCE, regression_data, sgd, tiny_model, tiny_trainer

RANKS = Path(__file__).parents[1] / "ranks"
SIZE = 4 * 70 - 1  # 70 updates of an epoch, the last of them smaller
DATA = regression_data(SIZE)
make = functools.partial(tiny_trainer, seed=1)


class Batches(TrainerCallback):
    """Sums losses of all ranks as they are computed, by update of the history. A rank without rows has no event."""

    ranks_agree_after_each_update = False

    def __init__(self) -> None:
        self.sums: dict[int, tuple[float, float]] = {}
        self.rates: dict[int, float] = {}

    def on_train_step_end(self, trainer: Trainer, batch: Any, batch_output: Any, **kwargs: Any) -> None:
        own = [batch_output["loss"].item() * len(batch[0]), len(batch[0])]
        rows = trainer.gather(torch.tensor([own], dtype=torch.float64)).sum(0).tolist()
        update = trainer.run_history.updates_done + 1
        total, count = self.sums.get(update, (0.0, 0))
        self.sums[update] = total + rows[0], count + rows[1]

    def on_optimizer_step_end(self, trainer: Trainer, **kwargs: Any) -> None:
        self.rates[trainer.run_history.updates_done] = trainer.optimizer.param_groups[0]["lr"]


def train(trainer: Trainer, num_epochs: int | None = 2, data: Any = DATA, **arguments: Any) -> RunHistory:
    return trainer.train(data, num_epochs, **{"per_device_batch_size": 4, **arguments})


def facts(records: Sequence[StepRecord]) -> list[StepRecord]:
    """The records without times and memory."""
    return [
        each._replace(seconds=0, samples_per_second=0, data_wait_share=0, peak_memory=None, ranks=())
        for each in records
    ]


def assert_are_the_means(records: Sequence[StepRecord], batches: Batches) -> None:
    """Each update is in one record, whose loss is the mean over its samples."""
    before, samples = 0, 0.0
    for record in records:
        sums = [batches.sums[update] for update in range(before + 1, record.update + 1)]
        total, count = (sum(column) for column in zip(*sums, strict=True))
        assert record.train_loss == pytest.approx(total / count, rel=TOLERANCE)
        samples += count
        assert record.samples == samples
        assert record.learning_rates == (batches.rates[record.update],)
        before = record.update
    assert before == max(batches.sums)


def halving(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)


@pytest.mark.parametrize("interval", [None, 1, 3, 16, 64, 65, 1000])
@pytest.mark.parametrize("accumulation", [1, 3])
def test_records_are_means_over_all_samples_of_their_updates(interval: int | None, accumulation: int) -> None:
    batches = Batches()
    size = SIZE * accumulation - 2  # neither a full batch nor a full update at the end
    history = train(
        make(batches),
        data=regression_data(size),
        gradient_accumulation_steps=accumulation,
        record_every_n_steps=interval,
        create_scheduler_fn=halving,
    )
    assert_are_the_means(history.step_records, batches)
    distance = interval or 1
    of_epoch = [*range(distance, 70, distance), 70]
    assert [record.update for record in history.step_records] == [*of_epoch, *(70 + update for update in of_epoch)]
    assert [record.epoch for record in history.step_records] == [1] * len(of_epoch) + [2] * len(of_epoch)
    times = [record.seconds for record in history.step_records]
    assert times == sorted(times)
    for record in history.step_records:
        assert record.samples_per_second > 0
        assert 0 <= record.data_wait_share <= 1
        assert record.gradient_norm is None
        assert record.peak_memory is None or record.peak_memory > 2**20


def test_weights_and_mean_losses_do_not_depend_on_the_interval() -> None:
    results = []
    for interval in (1, 5, 64, 100, 10_000):
        trainer = make()
        history = train(trainer, gradient_clip_norm=0.5, record_every_n_steps=interval)
        weights = [parameter.tolist() for parameter in trainer.model.parameters()]
        results.append((weights, history.records))
    assert all(result == results[0] for result in results)


class Stream(torch.utils.data.IterableDataset[Any]):
    def __iter__(self) -> Any:
        yield from zip(*regression_data(4 * 700), strict=True)


def test_the_distance_grows_where_the_number_of_updates_is_unknown() -> None:
    batches = Batches()
    history = train(make(batches), 1, data=Stream())
    assert_are_the_means(history.step_records, batches)
    expected = [*range(1, 257), *range(258, 513, 2), *range(516, 701, 4)]
    assert [record.update for record in history.step_records] == expected


# ------------------------------------------------------------------------------------------ stopping and going on


class Save(TrainerCallback):
    """Saves a state after some updates, and at the start of the last epoch."""

    ranks_agree_after_each_update = False

    def __init__(self, folder: Path, *updates: int) -> None:
        self.folder, self.updates = folder, updates

    def on_optimizer_step_end(self, trainer: Trainer, **kwargs: Any) -> None:
        if trainer.run_state.updates in self.updates:
            trainer.save_training_state(self.folder / str(trainer.run_state.updates))

    def on_train_epoch_start(self, trainer: Trainer, **kwargs: Any) -> None:
        trainer.save_training_state(self.folder / "start")


@pytest.mark.parametrize("interval", [5, 100])
def test_a_resumed_run_has_the_records_of_the_whole_one(interval: int, tmp_path: Path) -> None:
    updates = (1, 5, 63, 64, 66, 70, 71, 137)
    arguments: dict[str, Any] = {"gradient_clip_norm": 0.5, "record_every_n_steps": interval}
    whole = train(make(Save(tmp_path, *updates)), **arguments)
    alone = train(make(), **arguments)
    assert facts(whole.step_records) == facts(alone.step_records)  # saves change nothing
    for state in (*updates, "start"):  # and where the second epoch has begun, but has no update
        resumed = train(make(), resume_from=tmp_path / str(state), **arguments)
        assert facts(resumed.step_records) == facts(whole.step_records)
        assert resumed.get_metric_values("train_loss_epoch") == whole.get_metric_values("train_loss_epoch")
        assert (seconds := [record.seconds for record in resumed.step_records]) == sorted(seconds)


def test_further_runs_go_on_counting() -> None:
    batches = Batches()
    trainer = make(batches)
    train(trainer, 1, record_every_n_steps=32)
    history = train(trainer, 1, record_every_n_steps=32, reset_run_history=False)
    assert_are_the_means(history.step_records, batches)
    assert [record.update for record in history.step_records] == [32, 64, 70, 102, 134, 140]
    assert [record.epoch for record in history.step_records] == [1, 1, 1, 2, 2, 2]
    assert (seconds := [record.seconds for record in history.step_records]) == sorted(seconds)
    assert train(trainer, 1, record_every_n_steps=70).step_records[0].update == 70


def test_a_run_that_is_stopped_within_an_epoch_has_a_record_of_its_last_updates() -> None:
    class Stop(TrainerCallback):
        def on_optimizer_step_end(self, trainer: Trainer, **kwargs: Any) -> None:
            if trainer.run_history.updates_done in (13, 20):
                raise StopTrainingError("enough")

    batches = Batches()
    trainer = make(batches, Stop())
    train(trainer, 1, record_every_n_steps=5)
    history = train(trainer, 1, record_every_n_steps=5, reset_run_history=False)
    assert [record.update for record in history.step_records] == [5, 10, 13, 18, 20]
    assert_are_the_means(history.step_records, batches)


def test_a_skipped_update_does_not_count() -> None:
    class Bad(Trainer):
        def calculate_train_batch_loss(self, batch: Any) -> dict[str, Any]:
            output = super().calculate_train_batch_loss(batch)
            return {**output, "loss": output["loss"] * (math.nan if self.run_state.updates in (2, 4, 5) else 1)}

    model = tiny_model()
    trainer = Bad(model, nn.MSELoss(), sgd(model), callbacks=(), seed=1)
    with pytest.warns(UserWarning, match="left out"):
        history = train(trainer, 1, data=regression_data(24), nonfinite_policy="skip", record_every_n_steps=2)
    first, second, third = history.step_records
    assert math.isfinite(first.train_loss)
    assert math.isfinite(second.train_loss)
    assert math.isnan(third.train_loss)
    plain = train(Bad(model, nn.MSELoss(), sgd(model), callbacks=(), seed=1), 1, data=regression_data(24))
    assert [math.isnan(record.train_loss) for record in plain.step_records][:3] == [False, False, True]


# ------------------------------------------------------------------------------------------------------ processes


@in_release  # trackers, which log them, are looked at in tests/callbacks/test_trackers.py
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_killed_run_leaves_neither_gaps_nor_doubles(ranks: int, tmp_path: Path) -> None:
    script = RANKS / "step_records.py"
    with pytest.raises(AssertionError):
        run_on_ranks(script, ranks, tmp_path, "killed")
    assert (tmp_path / "states").is_dir()
    run_on_ranks(script, ranks, tmp_path, "resumed")
    if ranks > 1:
        run_on_ranks(script, 1, tmp_path, "fewer")
