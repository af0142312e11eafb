"""Workers start by themselves where they make a run faster, and nobody can tell from the batches who has made them."""

import contextlib
import errno
import fcntl
import itertools
import multiprocessing
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
from pytorch_accelerated.data import automatic, fetching
from pytorch_accelerated.data.automatic import AutomaticLoader, can_be_shared
from pytorch_accelerated.data.planned_loader import PlannedLoader
from tests.data.loaders import adapted

pytestmark = pytest.mark.skipif(
    not hasattr(os, "fork"), reason="workers start by themselves only where they are forked"
)

SIZE = 240
BATCH = 4


@pytest.fixture(autouse=True)
def two_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetching, "usable_processors", lambda: 2)


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
    if workers is None:
        loader = adapted(AutomaticLoader(dataset, BATCH, shuffle=True), seed=3)
    else:
        loader = adapted(DataLoader(dataset, BATCH, shuffle=True, num_workers=workers), seed=3)
    assert isinstance(loader, PlannedLoader)
    said: list[str] = []
    loader.expect_passes(2, said.append)
    return loader, said


def batches_of(loader: PlannedLoader) -> Iterator[Any]:
    return (batch.tolist() for batch in loader)


def first_half_of(loader: PlannedLoader) -> list[Any]:
    """Within which slow rows have workers, where these are any use."""
    return list(itertools.islice(batches_of(loader), SIZE // BATCH // 2))


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
    loader.set_epoch(0)
    assert first_half_of(loader) == expected[0][: SIZE // BATCH // 2]
    loader.set_epoch(1)
    assert list(batches_of(loader)) == expected[1], "after a pass that was left in the middle"
    loader.close()
    assert workers[0] == 0
    assert workers[len(expected[0]) // 2] > 0
    assert workers[-1] == workers[len(expected[0])] > 0
    assert len(said) == 1
    assert "the Sleepy is read by worker processes from now on (2)" in said[0]


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
    monkeypatch.setattr(automatic, "_PATIENCE", 0.3)
    monkeypatch.setattr("torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL", 0.1)  # how long torch asks them to end
    loader, said = loader_of(dataset)
    assert list(batches_of(loader)) == expected[0]
    loader.set_epoch(1)
    assert first_half_of(loader) == expected[1][: SIZE // BATCH // 2]
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
    assert list(batches_of(loader)) == expected[0]
    loader.set_epoch(1)
    assert first_half_of(loader) == expected[1][: SIZE // BATCH // 2]
    assert "without: this process reads it from now on" in said[-1]
    assert loader.num_workers == 0


def test_workers_that_cannot_be_forked_are_done_without(
    expected: list[list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fork() -> int:
        raise OSError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(os, "fork", fork)
    loader, said = loader_of(Sleepy())
    assert list(batches_of(loader)) == expected[0]
    assert "Resource temporarily unavailable" in said[-1]


# ------------------------------------------------------------------------------------------ what workers must not read


class Holding(Sleepy):
    def __init__(self, thing: Any) -> None:
        self.thing = thing

    def close(self) -> None:
        for thing in [self.thing, *(self.thing["db"] if isinstance(self.thing, dict) else ())]:
            getattr(thing, "close", int)()


@pytest.mark.parametrize(
    "make",
    [
        lambda: Holding(Path(__file__).open("rb")),  # noqa: SIM115
        lambda: Holding({"db": [sqlite3.connect(":memory:")]}),
        lambda: Holding(random.Random(3)),
        lambda: Holding(np.random.default_rng(3)),
        lambda: Holding(torch.Generator()),
    ],
)
def test_datasets_that_copies_of_this_process_must_not_read_stay_here(make: Any) -> None:
    dataset = make()
    loader, said = loader_of(dataset)
    with contextlib.closing(dataset):
        first_half_of(loader)
    assert loader.num_workers == 0
    assert said == []


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
    assert can_be_shared(dataset)


@pytest.mark.parametrize("default", ["spawn", "forkserver"])
@pytest.mark.parametrize("is_set", [True, False])
def test_no_workers_start_where_processes_are_not_forked(
    default: str, is_set: bool, expected: list[list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether the user has set the method, or it is that of the platform or the version of Python."""

    class Local(Sleepy):
        """No other process could import this class."""

    if is_set:
        multiprocessing.set_start_method(default, force=True)
    else:
        context: Any = multiprocessing.context
        monkeypatch.setattr(context._default_context, "_actual_context", None)
        monkeypatch.setattr(context._default_context, "_default_context", context._concrete_contexts[default])
        monkeypatch.setattr(multiprocessing, "get_all_start_methods", lambda: [default, "fork"])
    try:
        loader, said = loader_of(Local())
        assert first_half_of(loader) == expected[0][: SIZE // BATCH // 2]
        assert loader.num_workers == 0
        assert said == []
        assert multiprocessing.get_start_method(allow_none=True) == (default if is_set else None)
    finally:
        multiprocessing.set_start_method(None, force=True)


# ------------------------------------------------------------------------------------------------------- the decision


@pytest.mark.parametrize(
    ("fetch", "step", "processors", "workers"),
    [
        (0.0002, 0.0004, 2, 0),  # rows of some microseconds
        (0.0033, 0.0004, 2, 2),  # rows of 100 microseconds
        (0.033, 0.0004, 2, 2),
        (0.033, 0.0004, 1, 0),  # nobody could work beside this process
        (0.033, 0.0004, 64, 8),
        (0.033, 0.1, 4, 1),  # one worker keeps up with the step
        (0.001, 0.1, 4, 0),  # there is little to gain
    ],
)
@pytest.mark.parametrize("batches_left", [10_000, 2])
def test_the_number_of_workers_follows_from_what_a_batch_takes(
    fetch: float, step: float, processors: int, workers: int, batches_left: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetching, "usable_processors", lambda: processors)
    loader, _ = loader_of(Sleepy())
    fetcher = loader._fetcher.automatic
    assert fetcher is not None
    fetcher._times = [(1.0, 1.0)] + [(fetch, step)] * 4
    fetcher._decide(batches_left)
    assert fetcher.num_workers == (workers if batches_left > 2 else 0), "a start must be worth it"


def test_the_users_own_loader_gets_the_default_arguments_as_torch_takes_them() -> None:
    trainer = Trainer(torch.nn.Linear(1, 1), None, None, callbacks=())  # type: ignore[arg-type]
    trainer.train_dataset = Sleepy()
    arguments = trainer.get_default_train_dl_kwargs(4)
    assert "num_workers" not in arguments
    assert DataLoader(Sleepy(), **arguments).num_workers == 0  # type: ignore[var-annotated]
    assert isinstance(trainer.create_train_dataloader(4), AutomaticLoader)
    assert not isinstance(trainer.create_train_dataloader(4, {"num_workers": 0}), AutomaticLoader)
