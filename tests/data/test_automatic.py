"""Workers start by themselves where they make a run faster, and nobody can tell from the batches who has made them."""

import contextlib
import errno
import fcntl
import os
import random
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

from pytorch_accelerated import Trainer
from pytorch_accelerated.data import automatic
from pytorch_accelerated.data.planned_loader import PlannedLoader
from pytorch_accelerated.data.worker_choice import (
    AutomaticWorkers,
    DatasetCheck,
    Pace,
    SlowRows,
    Trial,
    usable_processors,
)
from tests.data.loaders import adapted

pytestmark = pytest.mark.skipif(
    not hasattr(os, "fork"), reason="workers start by themselves only where they are forked"
)

SIZE = 240
BATCH = 4
PROCESSORS = 2


class Sleepy(Dataset[Any]):
    """Rows that wait, as for a disk, and have a random part."""

    seconds = 0.01

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(self.seconds)
        return index + torch.rand(())

    def close(self) -> None:
        """Close what the dataset holds."""


class OnlyHere(Sleepy):
    """Rows that a worker can't read."""

    def __getitem__(self, index: int) -> torch.Tensor:
        if get_worker_info() is not None:
            self.fail()
        return super().__getitem__(index)

    def fail(self) -> None:
        raise OSError("a handle that did not survive")


class DiesElsewhere(OnlyHere):
    def fail(self) -> None:
        os._exit(3)


class HangsElsewhere(OnlyHere):
    def fail(self) -> None:
        time.sleep(600)


def loader_of(dataset: Any, workers: int | None = None) -> tuple[PlannedLoader, list[str]]:
    """A loader whose workers are left to it unless given, and what it says."""
    chosen = AutomaticWorkers(PROCESSORS) if workers is None else workers
    loader = adapted(DataLoader(dataset, BATCH, shuffle=True, num_workers=chosen), seed=3)
    assert isinstance(loader, PlannedLoader)
    said: list[str] = []
    loader.expect_passes(2, said.append)
    return loader, said


def batches_of(loader: PlannedLoader) -> Iterator[Any]:
    return (batch.tolist() for batch in loader)


@pytest.fixture(scope="module")
def expected() -> list[list[Any]]:
    """The batches of two epochs, made in this process."""

    class Quick(Sleepy):
        seconds = 0.0

    loader, _ = loader_of(Quick(), workers=0)
    epochs = []
    for epoch in range(2):
        loader.set_epoch(epoch)
        epochs.append(list(batches_of(loader)))
    return epochs


def test_slow_rows_get_workers_within_the_first_pass_and_keep_them(expected: list[list[Any]]) -> None:
    loader, said = loader_of(Sleepy())
    workers = []
    for epoch in range(2):
        loader.set_epoch(epoch)
        found = []
        for batch in batches_of(loader):
            workers.append(loader.num_workers)
            found.append(batch)
        assert found == expected[epoch]
    loader.close()
    assert workers[0] == 0
    assert workers[len(expected[0]) // 2] > 0
    assert workers[-1] == workers[len(expected[0])] > 0
    assert len(said) == 1
    assert "read the Sleepy from now on" in said[0]


def test_very_slow_rows_get_workers_within_the_first_batch(expected: list[list[Any]]) -> None:
    class VerySlow(Sleepy):
        seconds = 0.04

    loader, _ = loader_of(VerySlow())
    first = next(batches := batches_of(loader))
    assert loader.num_workers > 0
    assert [first, *batches] == expected[0]
    loader.close()


def test_quick_rows_never_get_workers(expected: list[list[Any]]) -> None:
    class Quick(Sleepy):
        seconds = 0.0

    loader, said = loader_of(Quick())
    for batch, known in zip(batches_of(loader), expected[0], strict=True):
        assert (batch, loader.num_workers) == (known, 0)
    assert said == []


def test_a_short_pass_gets_no_workers_for_it() -> None:
    loader, _ = loader_of(Sleepy())
    loader.expect_passes(1, print)
    assert len(list(loader.limited(6))) == 6
    assert loader.num_workers == 0


@pytest.mark.parametrize("dataset", [OnlyHere(), DiesElsewhere(), HangsElsewhere()], ids=type)
def test_what_workers_do_not_deliver_is_made_here(
    dataset: Any, expected: list[list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(automatic, "_PATIENCE_SECONDS", 0.5)
    monkeypatch.setattr(automatic, "_PATIENCE_BATCHES", 20)
    loader, said = loader_of(dataset)
    for epoch in range(2):
        loader.set_epoch(epoch)
        assert list(batches_of(loader)) == expected[epoch]
    assert loader.num_workers == 0
    assert len(said) == 2
    assert "this process reads it from now on" in said[1]


def test_an_error_of_a_row_is_raised_as_if_there_were_no_workers(expected: list[list[Any]]) -> None:
    last = int(expected[0][-1][-1])

    class Broken(Sleepy):
        def __getitem__(self, index: int) -> torch.Tensor:
            if index == last:
                raise KeyError(index)
            return super().__getitem__(index)

    loader, said = loader_of(Broken())
    with pytest.raises(KeyError) as caught:
        list(loader)
    assert caught.value.args == (last,), "torch puts the text of a worker's traceback here"
    assert len(said) == 1
    loader.close()


def test_workers_that_gain_nothing_are_stopped(tmp_path: Path, expected: list[list[Any]]) -> None:
    class OneAtATime(Sleepy):
        """Rows behind a lock that all processes share, which takes them longer than one of them."""

        def __getitem__(self, index: int) -> torch.Tensor:
            with (tmp_path / "lock").open("w") as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                time.sleep(0.0 if get_worker_info() is None else 0.03)
                return super().__getitem__(index)

    loader, said = loader_of(OneAtATime())
    for epoch in range(2):
        loader.set_epoch(epoch)
        assert list(batches_of(loader)) == expected[epoch]
    assert "this process reads the OneAtATime again" in said[-1]
    assert loader.num_workers == 0


def test_workers_that_cannot_be_forked_are_done_without(
    expected: list[list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fork() -> int:
        raise OSError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(os, "fork", fork)
    loader, said = loader_of(Sleepy())
    assert list(batches_of(loader)) == expected[0]
    assert "can't be started" in said[-1]


def test_a_pass_that_is_left_in_the_middle_is_followed_by_a_whole_one(expected: list[list[Any]]) -> None:
    loader, _ = loader_of(Sleepy())
    for number, batch in enumerate(batches_of(loader)):
        assert batch == expected[0][number]
        if number == len(expected[0]) // 2:
            break
    assert loader.num_workers > 0
    loader.set_epoch(1)
    assert list(batches_of(loader)) == expected[1]
    loader.close()


def test_weights_do_not_depend_on_workers_that_start_by_themselves() -> None:
    class Rows(Sleepy):
        def __getitem__(self, index: int) -> Any:
            noise = super().__getitem__(index) - index
            return torch.full((3,), float(index % 7)) + noise, torch.tensor([float(index % 5)])

    def trained(**arguments: Any) -> torch.Tensor:
        torch.manual_seed(0)
        model = torch.nn.Linear(3, 1)
        trainer = Trainer(model, torch.nn.MSELoss(), torch.optim.SGD(model.parameters(), lr=0.01), callbacks=())
        trainer.train(Rows(), num_epochs=2, per_device_batch_size=BATCH, **arguments)
        return model.weight.detach()

    assert torch.equal(trained(), trained(train_dataloader_kwargs={"num_workers": 0}))


@pytest.mark.parametrize(
    ("arguments", "updates"),
    [
        ({"max_num_train_steps": 30}, 30),
        ({"max_num_train_steps": 3}, 3),
        ({"num_epochs": 9, "max_num_train_steps": 4}, 4),
    ],
)
@pytest.mark.parametrize("seconds", [0.0, 0.002])
def test_a_run_may_be_as_long_as_a_number_of_updates(arguments: dict[str, Any], updates: int, seconds: float) -> None:
    class Rows(Sleepy):
        def __getitem__(self, index: int) -> Any:
            time.sleep(seconds)
            return torch.full((3,), float(index % 7)), torch.tensor([float(index % 5)])

    model = torch.nn.Linear(3, 1)
    trainer = Trainer(model, torch.nn.MSELoss(), torch.optim.SGD(model.parameters(), lr=0.01), callbacks=())
    trainer.train(Rows(), per_device_batch_size=BATCH, eval_dataset=Rows(), **{"num_epochs": None, **arguments})
    assert trainer.run_state.updates == updates


def test_a_learning_rate_is_found_and_a_model_described_on_a_dataset_of_rows() -> None:
    rows = [(torch.full((3,), float(index % 7)), torch.tensor([float(index % 5)])) for index in range(150)]
    model = torch.nn.Linear(3, 1)
    trainer = Trainer(model, torch.nn.MSELoss(), torch.optim.SGD(model.parameters(), lr=0.01), callbacks=())
    suggestion = trainer.find_lr(rows, per_device_batch_size=16).suggestion
    assert suggestion is not None
    assert suggestion > 0
    assert "Linear" in str(trainer.summary(rows, per_device_batch_size=16))


# ------------------------------------------------------------------------------------------ what workers must not read


class Holding(Sleepy):
    def __init__(self, thing: Any) -> None:
        self.thing = thing

    def close(self) -> None:
        for thing in [self.thing, *(self.thing["db"] if isinstance(self.thing, dict) else ())]:
            getattr(thing, "close", int)()


class Counting(Sleepy):
    reads = 0

    def __getitem__(self, index: int) -> torch.Tensor:
        self.reads += 1
        return super().__getitem__(index)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: Holding(Path(__file__).open("rb")), "holds a BufferedReader"),  # noqa: SIM115
        (lambda: Holding({"db": [sqlite3.connect(":memory:")]}), "holds a Connection"),
        (Counting, "reading rows changes it"),
        (lambda: Holding(random.Random(3)), "random generator of its own"),
        (lambda: Holding(np.random.default_rng(3)), "random generator of its own"),
        (lambda: Holding(torch.Generator()), "random generator of its own"),
    ],
)
def test_datasets_that_copies_of_this_process_must_not_read_stay_here(make: Any, reason: str) -> None:
    dataset = make()
    loader, said = loader_of(dataset)
    with contextlib.closing(dataset):
        list(loader)
    assert loader.num_workers == 0
    assert len(said) == 1
    assert reason in said[0]
    assert "Pass `num_workers`" in said[0]


def test_datasets_of_plain_parts_may_be_read_by_copies() -> None:
    parts = [
        torch.ones(2),
        np.ones(2),
        lambda x: x,
        torch.nn.Linear(1, 1),
        Path("x"),
        "x",
        len,
        random.random,
        np.float32,
    ]
    dataset = Holding({"parts": parts, "nested": Holding((1, None, {3}))})
    assert DatasetCheck(dataset).reason_to_stay() is None


# ------------------------------------------------------------------------------------------------------- the decision


@pytest.mark.parametrize(
    ("pace", "processors", "workers"),
    [
        (Pace(0.0002, 0.0002, 0.0004, 0.0004), 2, 0),  # rows of some microseconds
        (Pace(0.0033, 0.0033, 0.0004, 0.0004), 2, 2),  # rows of 100 microseconds
        (Pace(0.033, 0.033, 0.0004, 0.0004), 2, 2),
        (Pace(0.033, 0.033, 0.0004, 0.0004), 1, 0),  # nobody could work beside this process
        (Pace(0.033, 0.033, 0.0004, 0.0004, share=0.5), 2, 0),  # others use the processors
        (Pace(0.033, 0.001, 0.0004, 0.0004), 1, 8),  # rows that wait for a disk
        (Pace(0.01, 0.01, 0.1, 0.4), 4, 0),  # the step itself uses all processors
        (Pace(0.033, 0.033, 0.033, 0.033), 4, 1),  # one worker keeps up with the step
        (Pace(0.033, 0.033, 0.0004, 0.0004), 64, 8),
    ],
)
def test_the_number_of_workers_follows_from_what_a_batch_takes(pace: Pace, processors: int, workers: int) -> None:
    assert pace.best_workers(processors, batches_left=10_000) == workers


def test_workers_must_gain_more_than_their_start_costs() -> None:
    pace = Pace(0.033, 0.033, 0.0004, 0.0004)
    assert pace.best_workers(2, batches_left=5) == 0
    assert pace.best_workers(2, batches_left=50) == 2


def test_a_trial_measures_fetching_and_steps() -> None:
    trial = Trial()
    for _ in range(4):
        assert not trial.is_complete
        trial.begin()
        time.sleep(0.01)
        trial.end_fetch()
        sum(range(200_000))
        trial.end_step()
        if trial.is_complete:
            break
    pace = trial.pace
    assert pace.fetch >= 0.01 > pace.fetch_cpu
    assert pace.step >= 0.9 * pace.step_cpu > 0
    assert 0 < pace.share <= 1


def test_slow_rows_are_noticed_without_the_slowest_of_them() -> None:
    rows = SlowRows(100)
    time.sleep(0.2)  # a file is opened
    assert rows.after_row() is None
    paces = [rows.after_row() for _ in range(3)]
    assert all(pace is None for pace in paces), "the other rows are quick"
    rows = SlowRows(100)
    pace = None
    while pace is None:
        time.sleep(0.01)
        pace = rows.after_row()
    assert pace.fetch >= 1.0


def test_the_number_is_0_for_whoever_reads_it() -> None:
    number = AutomaticWorkers(4)
    assert number == 0
    assert str(number) == "0"
    assert DataLoader(range(3), num_workers=number).num_workers is number  # type: ignore[arg-type, var-annotated]


def test_processors_are_those_that_this_process_may_use() -> None:
    assert 1 <= usable_processors() <= (os.cpu_count() or 1)
