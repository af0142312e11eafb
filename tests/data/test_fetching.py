"""Batches are fetched with the same randomness wherever it happens, and workers do what their user expects of them."""

import contextlib
import itertools
import multiprocessing
import os
import random
import sys
import time
from collections.abc import Iterator
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    Subset,
    default_collate,
    get_worker_info,
)

from pytorch_accelerated.data.building import build_loader
from pytorch_accelerated.utils import set_seed
from tests.checkpointing.same_state import assert_same_state
from tests.data.loaders import Numbers, Stream, adapted, numbers_in
from tests.support.processes import run_forked

WORKERS = [0, 1, 2, 4]
SIZE = 12


def draws() -> list[float]:
    """One number of each generator."""
    return [float(torch.rand(())), float(np.random.rand()), random.random()]


class Noise(Dataset[Any]):
    """Samples that are nothing but randomness."""

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(draws())


def noisy_collate(samples: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([torch.stack(samples), torch.tensor([draws()])])


class NoiseStream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        for _ in range(SIZE):
            yield torch.tensor(draws())


def batches_of(dataset: Any, *, workers: int, batch_size: int = 3, seed: int = 0, epoch: int = 0) -> list[Any]:
    loader = adapted(
        DataLoader(dataset, batch_size, shuffle=True, num_workers=workers, collate_fn=noisy_collate), seed=seed
    )
    loader.set_epoch(epoch)
    return [batch.tolist() for batch in loader]


@pytest.mark.filterwarnings("ignore:This DataLoader will create")  # more workers than some machines have processors
def test_randomness_belongs_to_the_batch_and_not_to_who_fetches_it() -> None:
    expected = batches_of(Noise(), workers=0)
    for workers in WORKERS[1:]:
        assert batches_of(Noise(), workers=workers) == expected
    numbers = [number for batch in expected for row in batch for number in row]
    assert len(set(numbers)) == len(numbers), "some number was drawn twice"
    for other in ({"seed": 1}, {"epoch": 1}, {"seed": 2**32}):
        assert not {*numbers} & {
            number for batch in batches_of(Noise(), workers=0, **other) for number in sum(batch, [])
        }


@pytest.mark.parametrize("dataset", [Noise(), NoiseStream()], ids=type)
def test_numbers_drawn_between_batches_do_not_depend_on_workers(dataset: Any) -> None:
    def drawn(workers: int) -> list[float]:
        set_seed(1)
        loader = adapted(build_loader(dataset, {"batch_size": 4, "num_workers": workers}, None, None))
        return [
            number for _ in range(2) for _ in itertools.islice(loader, 3) for number in (*draws(), np.random.randn())
        ]

    assert drawn(0) == drawn(2)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stream_draws_other_numbers_in_every_epoch_and_the_same_ones_again(workers: int) -> None:
    loader = adapted(DataLoader(NoiseStream(), 3, num_workers=workers), seed=5)
    again = adapted(DataLoader(NoiseStream(), 3, num_workers=workers), seed=5)
    passes = []
    for epoch in range(3):
        loader.set_epoch(epoch)
        passes.append([batch.tolist() for batch in loader])
    again.set_epoch(2)  # as after a resume
    assert [batch.tolist() for batch in again] == passes[2]
    numbers = [number for batches in passes for batch in batches for row in batch for number in row]
    assert len(set(numbers)) == len(numbers) == 3 * SIZE * 3 * max(1, workers)


# ----------------------------------------------------------------------------------------------------------- workers


class WhoAmI(Dataset[Any]):
    """Each sample says in which process it was fetched, and what its worker was given before."""

    told = -1

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        info = get_worker_info()
        assert info is None or info.dataset is self
        return torch.tensor([os.getpid(), self.told])


def tell_the_dataset(worker_id: int) -> None:
    info = get_worker_info()
    assert info is not None
    assert info.id == worker_id
    assert isinstance(info.dataset, WhoAmI)
    info.dataset.told = worker_id


def test_the_users_worker_init_fn_sees_and_may_change_the_users_dataset() -> None:
    loader = adapted(DataLoader(WhoAmI(), 2, num_workers=2, worker_init_fn=tell_the_dataset))
    told = torch.cat(list(loader))[:, 1].tolist()
    assert told == [0, 0, 1, 1, 0, 0, 1, 1]


def test_workers_stay_over_the_epochs_unless_the_user_says_otherwise() -> None:
    def processes(given: dict[str, Any]) -> list[set[int]]:
        loader = adapted(build_loader(WhoAmI(), {"batch_size": 2, "num_workers": 2}, given, None))
        return [set(torch.cat(list(loader))[:, 0].tolist()) for _ in range(2)]

    first, second = processes({})
    assert first == second
    assert os.getpid() not in first
    first, second = processes({"persistent_workers": False})
    assert not first & second


@pytest.mark.parametrize("dataset", [Numbers(20), Stream(20)], ids=["map-style", "stream"])
@pytest.mark.parametrize("is_persistent", [True, False])
def test_a_closed_loader_has_no_workers_left_and_can_be_used_again(dataset: Any, is_persistent: bool) -> None:
    loader = adapted(DataLoader(dataset, 2, num_workers=2, persistent_workers=is_persistent))
    batches = iter(loader)
    next(batches)
    assert len(multiprocessing.active_children()) == 2
    loader.close()
    assert multiprocessing.active_children() == []
    assert next(iter(loader)).tolist() == [0, 1]
    loader.close()
    assert multiprocessing.active_children() == []


A_WORKER_DIES = """
import multiprocessing, os, signal, time
import pytest
from torch.utils.data import DataLoader
from tests.support.processes import run_forked
from tests.data.loaders import Numbers, adapted
from tests.support.ending import is_running

class Hanging(Numbers):
    def __getitem__(self, index):
        if index >= 4:
            is_reached.set()
            time.sleep(600)
        return super().__getitem__(index)

is_reached = multiprocessing.Event()
loader = adapted(DataLoader(Hanging(6), 2, num_workers=3))
assert next(iter(loader)).tolist() == [0, 1]
assert is_reached.wait(600)
handler = signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's is to notice it when the first one has ended
workers = sorted(worker.pid for worker in multiprocessing.active_children())
os.kill(workers[1], signal.SIGKILL)
os.waitid(os.P_PID, workers[1], os.WEXITED | os.WNOWAIT)
signal.signal(signal.SIGCHLD, handler)
with pytest.raises(RuntimeError, match=f"pid {workers[1]}.* killed by signal"):
    loader.close()
print(len(workers), [worker for worker in workers if is_running(worker)])
"""


@pytest.mark.processes
@pytest.mark.skipif(os.name != "posix", reason="Windows has no such signals")
def test_where_a_worker_has_died_the_others_are_ended_all_the_same() -> None:
    assert run_forked(A_WORKER_DIES).stdout == "3 []\n"


class HangsElsewhere(Numbers):
    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 3 and get_worker_info() is not None:
            time.sleep(600)
        return super().__getitem__(index)


def test_the_timeout_of_a_loader_is_torchs_own_and_no_worker_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL", 0.1)  # how long torch asks them to end
    loader = adapted(DataLoader(HangsElsewhere(9), 2, num_workers=2, timeout=1))
    with pytest.raises(RuntimeError, match="timed out after 1 seconds"):
        list(loader)
    loader.close()
    assert multiprocessing.active_children() == []


# ------------------------------------------------------------------------------------------ datasets that know better


class Many(Numbers):
    """Can fetch a whole batch; the values show how it was requested."""

    def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
        assert type(indices) is list
        assert all(type(index) is int for index in indices)
        return [torch.tensor([index, len(indices)]) for index in indices]


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("shuffle", [False, True])
def test_a_dataset_that_can_is_asked_once_for_a_batch(workers: int, shuffle: bool) -> None:
    batches = list(adapted(DataLoader(Many(10), 4, shuffle=shuffle, num_workers=workers)))
    assert [batch[:, 1].tolist() for batch in batches] == [[4] * 4, [4] * 4, [2] * 2]
    assert sorted(torch.cat(batches)[:, 0].tolist()) == list(range(10))
    subset = list(adapted(DataLoader(Subset(Many(10), [7, 8, 9]), 2, num_workers=workers)))
    assert [batch.tolist() for batch in subset] == [[[7, 2], [8, 2]], [[9, 1]]]


def test_in_memory_data_with_a_collate_function_is_given_sample_by_sample() -> None:
    seen: list[Any] = []

    def collate(samples: list[Any]) -> torch.Tensor:
        seen.extend(samples)
        return torch.stack([x for x, _ in samples])

    data = (torch.arange(4), torch.arange(4) * 10)
    loader = adapted(build_loader(data, {"batch_size": 3}, None, collate))
    assert numbers_in(loader) == [[0, 1, 2], [3]]
    assert [tuple(map(int, sample)) for sample in seen] == [(0, 0), (1, 10), (2, 20), (3, 30)]


@pytest.mark.parametrize(
    "columns",
    [
        {"x": [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], "y": [1, 2, 3], "z": [True, False, True]},
        {"x": [[[1, 2], [3, 4]]] * 3},
        {"x": [1.5, 2.5, 3.5], "name": ["a", "b", "c"]},
        {"x": [1.5, 2.5, 3.5], "nested": [{"a": 1, "b": 2.0}] * 3},
    ],
    ids=["tensors", "matrices", "with words", "nested"],
)
def test_whole_columns_of_a_hugging_face_dataset_are_what_torch_collates(columns: dict[str, Any]) -> None:
    dataset = datasets.Dataset.from_dict(columns).with_format("torch")
    (batch,) = adapted(DataLoader(dataset, 3))
    expected = default_collate([dataset[index] for index in range(3)])
    assert batch.keys() == expected.keys()
    for name, value in expected.items():
        assert type(batch[name]) is type(value)
        assert str(batch[name]) == str(value)


# -------------------------------------------------------------------------------------------------- the parts alone


class OwnIterator(IterableDataset[Any]):
    """A stream that is its own iterator: to iterate over it again begins a new pass."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.position = 0

    def __iter__(self) -> "OwnIterator":
        self.position = 0
        return self

    def __next__(self) -> tuple[torch.Tensor, float]:
        if self.position == self.size:
            raise StopIteration
        self.position += 1
        return torch.tensor([self.position, 0]), self.position / 3


class OwnIteratorWithState(OwnIterator):
    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


@pytest.mark.parametrize("settings", [{"drop_last": False}, {"drop_last": True}, {"batch_size": None}], ids=str)
@pytest.mark.parametrize("size", [0, 2, 6, 7])
@pytest.mark.parametrize("kind", [OwnIterator, OwnIteratorWithState])
def test_a_stream_read_in_this_process_gives_the_batches_of_torchs_loader(
    kind: type[OwnIterator], size: int, settings: dict[str, Any]
) -> None:
    def loader() -> DataLoader[Any]:
        return DataLoader(kind(size), **{"batch_size": 3, **settings})

    found = list(adapted(loader()).batches())
    assert_same_state([micro.batch for micro in found], list(loader()))
    if "batch_size" not in settings:
        assert [micro.samples for micro in found] == [len(batch[0]) for batch in loader()]


class OneBadRecord(Dataset[Any]):
    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 4:
            raise ValueError("a bad record")
        return torch.zeros(2)


def broken_collate(samples: list[torch.Tensor]) -> torch.Tensor:
    raise TypeError("cannot be collated")


@pytest.mark.skipif(sys.version_info < (3, 11), reason="exceptions take notes since Python 3.11")
@pytest.mark.parametrize("num_workers", [0, pytest.param(2, marks=pytest.mark.processes)])
@pytest.mark.parametrize(
    ("arguments", "error", "note"),
    [
        ({}, ValueError, "Raised for sample 4 of the OneBadRecord."),
        ({"collate_fn": broken_collate}, TypeError, "Raised for the batch of samples [0, 1, 2] of the OneBadRecord."),
    ],
    ids=["dataset", "collate function"],
)
def test_an_error_of_a_dataset_or_collate_function_says_for_which_samples(
    num_workers: int, arguments: dict[str, Any], error: type[Exception], note: str
) -> None:
    loader = adapted(DataLoader(OneBadRecord(), batch_size=3, num_workers=num_workers, **arguments))
    with contextlib.closing(loader), pytest.raises(error) as caught:
        list(loader)
    assert note in "".join([str(caught.value), *getattr(caught.value, "__notes__", ())])
