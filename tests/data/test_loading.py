"""Whatever yields samples or batches: each of them is used once, where it belongs."""

import itertools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    Sampler,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
)

from pytorch_accelerated.data.building import DataLoaderSlice, build_loader, effective_kwargs
from pytorch_accelerated.data.planned_loader import PlannedLoader
from pytorch_accelerated.data.sampling import epoch_order
from pytorch_accelerated.data.updates import RunLoader
from tests.data.loaders import Numbers, SizedStream, Stream, adapted, evaluated_on, numbers_in, trained_on, updates_of

SIZE = 11
UP = list(range(SIZE))
DOWN = UP[::-1]
PAIRS = [UP[start : start + 2] for start in range(0, SIZE, 2)]
OWN_BATCHES = [[3], [1, 4, 1], [5, 9, 2, 6]]


def flat(batches: list[list[int]]) -> list[int]:
    return list(itertools.chain.from_iterable(batches))


# ------------------------------------------------------------------------------------------- planned data, all ranks


@given(
    size=st.integers(1, 40),
    batch_size=st.integers(1, 4),
    ranks=st.integers(1, 4),
    steps=st.integers(1, 3),
    epoch=st.integers(0, 3),
    is_vectorised=st.booleans(),
)
def test_all_ranks_together_train_on_the_order_of_the_epoch(
    size: int, batch_size: int, ranks: int, steps: int, epoch: int, is_vectorised: bool
) -> None:
    dataset: Any = TensorDataset(torch.arange(size)) if is_vectorised else Numbers(size)
    loaders = [
        adapted(DataLoader(dataset, batch_size, shuffle=True), rank=rank, ranks=ranks, steps=steps, seed=7)
        for rank in range(ranks)
    ]
    assert [loader.is_vectorised for loader in loaders] == [is_vectorised] * ranks
    for loader in loaders:
        loader.set_epoch(epoch)
    passes = [updates_of(loader) for loader in loaders]
    assert {len(updates) for updates in passes} == {loaders[0].num_updates}
    used: list[int] = []
    for micro_batches in zip(*passes, strict=True):
        samples = micro_batches[0][0].update.samples
        counted = 0
        for row in zip(*micro_batches, strict=True):  # every rank has as many
            assert len({micro.has_empty_rank for micro in row}) == len({micro.is_last for micro in row}) == 1
            assert row[0].has_empty_rank == any(micro.is_borrowed for micro in row)
            for micro in row:
                numbers = (micro.batch[0] if is_vectorised else micro.batch).tolist()
                share = 0 if micro.is_borrowed else len(numbers)
                assert micro.weight == ranks * share / samples  # type: ignore[operator]
                counted += share
                used += [] if micro.is_borrowed else numbers
        assert [micro.is_last for micro in micro_batches[0]] == [False] * (len(micro_batches[0]) - 1) + [True]
        assert {micro.update.samples for of_rank in micro_batches for micro in of_rank} == {counted}
        assert [len({id(micro.update) for micro in of_rank}) for of_rank in micro_batches] == [1] * ranks
    assert used == epoch_order(size, seed=7, epoch=epoch).tolist()


def test_a_stream_whose_batches_have_no_size_resumes_by_batches() -> None:
    words = [["a"], ["b", "c"], ["d"], ["e"], ["f"]]
    loader = adapted(words, steps=2)
    updates = updates_of(loader)
    assert [[micro.batch for micro in update] for update in updates] == [words[:2], words[2:4], words[4:]]
    assert [update[0].update.samples for update in updates] == [2, 2, 1]
    assert [micro.weight for micro in adapted(words).batches()] == [1.0] * 5
    for start in range(6):
        again = [micro.batch for micro in loader.batches(start=start)]
        assert again == words[start:]


@pytest.mark.parametrize("make", [lambda: Numbers(SIZE), lambda: Stream(SIZE)], ids=["planned", "stream"])
def test_a_limit_counts_from_where_the_pass_resumes(make: Callable[[], Any]) -> None:
    loader = adapted(DataLoader(make(), 2), steps=2)
    limited = loader.limited(3)
    assert flat(trained_on(limited)) == [0, 1, 2, 3, 4, 5]
    assert flat(trained_on(limited, start=4, batches_done=2)) == [4, 5]
    assert flat(trained_on(limited, start=4, batches_done=0)) == [4, 5, 6, 7, 8, 9]
    assert flat(trained_on(limited, start=4, batches_done=3)) == []
    assert flat(trained_on(limited, start=4, batches_done=4)) == []


@pytest.mark.parametrize("make", [lambda: Numbers(SIZE), lambda: SizedStream(SIZE)], ids=["planned", "stream"])
def test_a_limited_loader_is_one_of_the_run_and_leaves_the_other_as_it_is(make: Callable[[], Any]) -> None:
    whole = adapted(DataLoader(make(), 2))
    limited = DataLoaderSlice(DataLoaderSlice(whole, 2), 4)
    assert isinstance(limited, RunLoader)
    assert (len(limited), limited.num_batches, limited.num_updates, limited.max_batches) == (2, 2, 2, 2)
    assert limited.slice_size == 4
    assert limited.dl.dl is whole
    assert flat(numbers_in(limited)) == flat(trained_on(limited)) == flat(evaluated_on(limited)) == [0, 1, 2, 3]
    assert flat(numbers_in(whole)) == flat(trained_on(whole)) == flat(evaluated_on(whole)) == UP
    assert len(whole.limited(100)) == len(whole) == 6


# -------------------------------------------------------------------------------------------------- kinds of loaders


class Backwards(Sampler[Any]):
    """The indices from the last to the first, as `kind` of numbers."""

    def __init__(self, size: int = SIZE, kind: Callable[[int], Any] = int) -> None:
        self.size = size
        self.kind = kind
        self.readings = 0
        self.epochs: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)

    def __iter__(self) -> Iterator[Any]:
        self.readings += 1
        return map(self.kind, reversed(range(self.size)))

    def __len__(self) -> int:
        return self.size


class RowsOf(DataLoader[Any]):
    """A loader whose user has changed what iterating over it means."""

    def __iter__(self) -> Any:
        return (10 * batch for batch in super().__iter__())


class StreamOf(IterableDataset[Any]):
    def __init__(self, items: Any) -> None:
        self.items = items

    def __iter__(self) -> Iterator[Any]:
        return iter(self.items)


# What each yields in batches of 2, if that is its own business.
LOADERS: dict[str, tuple[Callable[[], Any], list[list[int]]]] = {
    "sequential": (lambda: DataLoader(Numbers(SIZE), 2), PAIRS),
    "drop_last": (lambda: DataLoader(Numbers(SIZE), 2, drop_last=True), PAIRS[:-1]),
    "subset": (lambda: DataLoader(Subset(Numbers(20), UP), 2), PAIRS),
    "tensor": (lambda: DataLoader(torch.arange(SIZE), 2), PAIRS),  # type: ignore[arg-type]
    "sampler": (lambda: DataLoader(torch.arange(SIZE), 4, sampler=Backwards()), [DOWN[:4], DOWN[4:8], DOWN[8:]]),  # type: ignore[arg-type]
    "list of indices": (lambda: DataLoader(Numbers(SIZE), 2, sampler=[4, 2, 4]), [[4, 2], [4]]),
    "torch's indices": (lambda: DataLoader(torch.arange(SIZE), 2, sampler=torch.tensor([4, 2, 4])), [[4, 2], [4]]),  # type: ignore[arg-type]
    "batch sampler": (lambda: DataLoader(Numbers(SIZE), batch_sampler=OWN_BATCHES), OWN_BATCHES),
    "torch's batch sampler, dropping": (
        lambda: DataLoader(torch.arange(SIZE), batch_sampler=BatchSampler(Backwards(), 4, True)),  # type: ignore[arg-type]
        [DOWN[:4], DOWN[4:8]],
    ),
    "batch sampler with an empty batch": (
        lambda: DataLoader(torch.arange(SIZE), batch_sampler=[[3], [], [1, 4]]),  # type: ignore[arg-type]
        [[3], [1, 4]],
    ),
    "stream": (lambda: DataLoader(Stream(SIZE), 2), PAIRS),
    "stream, dropping": (lambda: DataLoader(Stream(SIZE), 2, drop_last=True), PAIRS[:-1]),
    "stream with a length": (lambda: DataLoader(SizedStream(SIZE), 2), PAIRS),
    "list of batches": (lambda: [torch.tensor(batch) for batch in PAIRS], PAIRS),
    "list with an empty batch": (lambda: [torch.tensor([3]), torch.empty(0), torch.tensor([4])], [[3], [4]]),
    "subclass of DataLoader": (lambda: RowsOf(Numbers(3), 2), [[0, 10], [20]]),
    "samples that are batches": (lambda: DataLoader(PAIRS, batch_size=None, collate_fn=torch.tensor), PAIRS),  # type: ignore[arg-type]
    "stream of arrays that are batches": (
        lambda: DataLoader(StreamOf([np.array(batch) for batch in PAIRS]), batch_size=None),
        PAIRS,  # torch makes tensors of them
    ),
}


@pytest.mark.parametrize("kind", LOADERS)
def test_a_loader_yields_what_it_says_to_training_and_evaluation(kind: str) -> None:
    make, batches = LOADERS[kind]
    loader = adapted(make())
    # With several batches in an update, none is lost or cut anew.
    assert trained_on(loader) == trained_on(adapted(make(), steps=4)) == evaluated_on(adapted(make())) == batches
    assert trained_on(loader) == batches, "a second pass"
    assert numbers_in(loader) == batches
    if not kind.startswith(("stream", "subclass", "list with")) or "length" in kind:
        assert loader.num_batches == len(loader) == len(batches)
    if isinstance(loader, PlannedLoader):
        assert loader.num_samples == (SIZE if kind == "drop_last" else len(flat(batches)))
        assert loader.num_updates == len(batches)


@pytest.mark.parametrize(
    "sampler",
    [
        lambda data: WeightedRandomSampler([0.0, 1.0, 1.0, 0.0, 1.0], 40),
        lambda data: RandomSampler(data, replacement=True, num_samples=40),
        lambda data: RandomSampler(data, num_samples=40),
        lambda data: BatchSampler(RandomSampler(data), 2, False),
    ],
    ids=["weighted", "with replacement", "with a number", "in batches"],
)
def test_random_numbers_of_torch_follow_from_seed_and_epoch(sampler: Callable[[Any], Any]) -> None:
    data = TensorDataset(torch.arange(5))

    def order(seed: int, epoch: int) -> list[int]:
        chosen = sampler(data)
        sizes = {"batch_sampler": chosen} if isinstance(chosen, BatchSampler) else {"sampler": chosen, "batch_size": 2}
        loader = adapted(DataLoader(data, **sizes), seed=seed)
        loader.set_epoch(epoch)
        return flat([batch[0].tolist() for batch in loader])

    state = torch.get_rng_state()
    orders = {(seed, epoch): order(seed, epoch) for seed in (0, 1, 2**40) for epoch in (0, 1, 2)}
    assert all(order(*key) == orders[key] for key in orders)
    assert len(set(map(tuple, orders.values()))) > 3
    if isinstance(sampler(data), WeightedRandomSampler):
        assert set(flat(list(orders.values()))) == {1, 2, 4}
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("in_batches", [False, True])
def test_a_sampler_is_read_once_for_each_pass_and_gets_its_epoch(in_batches: bool) -> None:
    sampler = Backwards()
    sizes: dict[str, Any] = {"batch_sampler": BatchSampler(sampler, 4, False)} if in_batches else {"sampler": sampler}
    loader = adapted(DataLoader(Numbers(SIZE), **sizes))
    assert isinstance(loader, PlannedLoader)
    assert loader.num_samples == SIZE  # needs a reading
    assert loader.num_batches == (3 if in_batches else SIZE)
    for epoch in range(3):
        loader.set_epoch(epoch)
        assert flat(trained_on(loader)) == DOWN
        assert sampler.readings == epoch + 1
        assert sampler.epochs[-1] == epoch
    assert flat(trained_on(loader)) == DOWN  # the same epoch once more
    assert sampler.readings == 4


class ToldEpochs(Stream):
    def __iter__(self) -> Iterator[torch.Tensor]:
        return (torch.tensor(100 * self.epochs[-1] + number) for number in range(self.size))


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("workers", [0, 1])
def test_a_stream_gets_the_epoch_on_any_number_of_ranks_and_workers(ranks: int, workers: int) -> None:
    loader = adapted(build_loader(ToldEpochs(3), {"batch_size": 1, "num_workers": workers}, None, None), ranks=ranks)
    for epoch in (0, 1):
        loader.set_epoch(epoch)
        assert flat(numbers_in(loader))[0] == 100 * epoch


def test_workers_of_a_stream_may_share_it_among_themselves() -> None:
    class Shared(Stream):
        def __iter__(self) -> Iterator[torch.Tensor]:
            info = torch.utils.data.get_worker_info()
            assert info is not None
            assert info.dataset is self
            return (torch.tensor(number) for number in range(info.id, self.size, info.num_workers))

    seen = [
        flat(numbers_in(adapted(DataLoader(Shared(20), 3, num_workers=2), rank=rank, ranks=2))) for rank in range(2)
    ]
    assert sorted(flat(seen)) == list(range(20))


def test_iterables_that_are_not_shared_out_are_pointed_out_once_and_only_on_several_ranks() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        adapted([1])
        adapted([1], rank=1, ranks=2)
        adapted([1], ranks=2, is_sharded=True)
        adapted(DataLoader(Stream(2)), ranks=2)
        adapted(DataLoader(Numbers(2)), ranks=2)
    with pytest.warns(UserWarning, match="The list is used as it is on each of the 2 ranks.*is_sharded=True"):
        adapted([1], ranks=2)


# ------------------------------------------------------------------------------------------------- building loaders


def test_arguments_override_the_defaults() -> None:
    defaults = {"batch_size": 8, "shuffle": True, "num_workers": 0}
    given = {"batch_size": 3, "drop_last": True}
    assert effective_kwargs(defaults, given) == {**defaults, **given}
    sampler = Backwards()
    assert effective_kwargs(defaults, {"sampler": sampler}) == {"batch_size": 8, "num_workers": 0, "sampler": sampler}
    assert effective_kwargs(defaults, {"sampler": None}) == {**defaults, "sampler": None}
    of_batches = {"batch_sampler": OWN_BATCHES}
    assert effective_kwargs(defaults, of_batches) == {"num_workers": 0, **of_batches}
    assert defaults == {"batch_size": 8, "shuffle": True, "num_workers": 0}


def test_a_stream_that_yields_less_than_it_says_is_pointed_out() -> None:
    class Short(SizedStream):
        def __iter__(self) -> Any:
            return itertools.islice(super().__iter__(), self.size // 2)

    loader = adapted(DataLoader(Short(12), 2))
    with pytest.warns(UserWarning, match=r"12 samples but yields 6\..*Correct `__len__`") as caught:
        assert sum(map(len, loader)) == 6
    assert len(caught) == 1
    next(iter(adapted(DataLoader(Short(12), 2))))  # which is not all there is
    assert sum(map(len, adapted(DataLoader(SizedStream(11), 2, drop_last=True)))) == 10
    assert sum(map(len, adapted(DataLoader(Short(12), 2), ranks=2))) <= 6


def test_a_stream_that_yields_more_than_it_says_is_pointed_out() -> None:
    loader = adapted(DataLoader(SizedStream(6), 2, num_workers=2))
    with pytest.warns(UserWarning, match=r"6 samples but yields 12\..*get_worker_info") as caught:
        assert sum(map(len, loader)) == 12
    assert len([warning for warning in caught if warning.category is UserWarning]) == 1  # Python has its own
    loader.close()
    assert sum(map(len, adapted(DataLoader(SizedStream(6), 2)))) == 6
