"""The loaders of a run: every sample where it belongs, batch after batch, on any number of ranks.

A torch `DataLoader` is taken as a description (dataset, sampler, sizes, workers, collation) and rebuilt around our own
order, so that the order is a pure function of (seed, epoch) and every rank knows the size of every batch beforehand.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import operator
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler, Subset

from pytorch_accelerated.data.fetching import BatchFetcher, Request, StreamFetcher
from pytorch_accelerated.data.prefetch import DeviceFeed, WaitingTime
from pytorch_accelerated.data.sampling import (
    BatchListPlan,
    Cell,
    TrainingPlan,
    Window,
    epoch_order,
    evaluation_rounds,
)
from pytorch_accelerated.data.slicing import unsliced
from pytorch_accelerated.data.streams import is_stateful_loader
from pytorch_accelerated.distributed import Ranks
from pytorch_accelerated.errors import ArgumentTypeError, ConfigurationError, DataError
from pytorch_accelerated.seeding import host_generators_seeded, mixed_seed

CountItems = Callable[[Any], "int | None"]


class MicroBatch(NamedTuple):
    """A batch of this rank within an update.

    Attributes:
        batch: on the trainer's device.
        weight: what its mean loss is multiplied with, so that the update's gradient is the mean over all items of
            the update on all ranks; None where the number of items is not known beforehand.
        is_last: whether the update is complete after it.
        is_borrowed: whether it only keeps this rank in step with the others and counts nowhere.
        has_empty_rank: whether that is so for some rank; known to all ranks.
    """

    batch: Any
    weight: float | None
    is_last: bool
    is_borrowed: bool
    has_empty_rank: bool


class Update(NamedTuple):
    """What one optimizer update consumes.

    Attributes:
        micro_batches: those of this rank, in order, made as they are asked for.
        samples: over all ranks; where batches have no size that can be told, the number of them on a rank.
    """

    micro_batches: Iterable[MicroBatch]
    samples: int


def _only_batch_of_update(batch: Any) -> MicroBatch:
    """Of an update on one rank."""
    return MicroBatch(batch, 1.0, True, False, False)


class Round(NamedTuple):
    """One batch per rank of an evaluation or prediction.

    Attributes:
        batch: this rank's, on the trainer's device; None if it has no samples in this round, unless it borrows some.
        start: position of the batch's first sample in the order of the whole pass.
        has_empty_rank: whether some rank has no samples; known to all ranks.
        is_idle: whether this rank has none.
    """

    batch: Any
    start: int
    has_empty_rank: bool
    is_idle: bool = False


@dataclasses.dataclass(frozen=True)
class _EpochOrder:
    """The samples of one epoch: `indices` by position (None: as they come), and how they are cut."""

    indices: Any
    size: int
    batches: list[int] | None  # sizes of the batches of a batch sampler


class PlannedLoader:
    """Batches of a map-style dataset on this rank. Iterating over it yields one pass in the order of `set_epoch`.

    Args:
        loader: describes what to load.
        ranks: the processes.
        seed: of the run.
        accumulation_steps: batches of a rank per update.
        feed: takes host batches to the trainer's device.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        ranks: Ranks,
        *,
        seed: int,
        accumulation_steps: int = 1,
        feed: DeviceFeed,
    ) -> None:
        self.dataset = loader.dataset
        self.collate_fn = loader.collate_fn
        self.batch_size: int | None = loader.batch_size
        self.drop_last: bool = bool(loader.drop_last)
        self.num_workers = loader.num_workers
        self.sampler = loader.sampler
        self.batch_sampler = loader.batch_sampler
        self._ranks = ranks
        self._seed = seed
        self._epoch = 0
        self._accumulation_steps = accumulation_steps
        self._feed = feed
        self.waiting = WaitingTime()
        self._fetcher = BatchFetcher(loader, seed=seed)
        self._sizes: _EpochOrder | None = None
        self._read_ahead: tuple[int, _EpochOrder] | None = None  # with the epoch that it is for

    @property
    def is_vectorised(self) -> bool:
        """Whether a batch is one indexing operation in this process."""
        return self._fetcher.is_vectorised

    @property
    def num_samples(self) -> int:
        """Samples of one pass over all ranks, and those that `drop_last` leaves out."""
        return self._known_sizes.size

    @property
    def num_updates(self) -> int:
        """Updates of one training pass."""
        return self._plan(self._known_sizes).num_updates

    @property
    def num_batches(self) -> int:
        """Batches of this rank in one pass: of training, evaluation or prediction."""
        return self._plan(self._known_sizes).num_batches

    def __len__(self) -> int:
        return self.num_batches

    def __iter__(self) -> Iterator[Any]:
        for update in self.updates():
            yield from (micro.batch for micro in update.micro_batches if not micro.is_borrowed)

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of the next passes; epochs count from 0."""
        self._epoch = epoch

    def updates(
        self, *, start: int = 0, max_batches: int | None = None, count_items: CountItems | None = None
    ) -> Iterator[Update]:
        """The updates of a training pass.

        Args:
            start: samples of this epoch that have been used already, over all ranks.
            max_batches: batches of a rank after which the pass ends.
            count_items: counts the items of a host batch, where an item of the loss is not a sample; the update is
                then read ahead in host memory.
        """
        order = self._order()
        windows, planned = itertools.tee(self._plan(order).windows(start, max_batches))
        mine = (cells[self._ranks.index] for window in planned for cells in window.rounds)
        host_batches = self._fetch(order, mine)
        batches = self._feed(host_batches) if count_items is None else host_batches
        for window in windows:
            if count_items is None:
                yield Update(self._micro_batches(window, batches), window.size)
            else:
                sizes = [cell.size for cell in window.cells_of(self._ranks.index)]
                host = list(itertools.islice(batches, len(sizes)))
                counts = [count_items(batch) if size else 0 for size, batch in zip(sizes, host, strict=True)]
                weights = item_weights(self._ranks, counts, sizes)
                yield Update(self._micro_batches(window, self._feed(iter(host)), weights), window.size)

    def rounds(self, *, max_rounds: int | None = None, borrows: bool = False) -> Iterator[Round]:
        """The rounds of an evaluation or prediction pass: every sample once.

        Args:
            max_rounds: after which the pass ends.
            borrows: give a rank that has no samples in a round one of another round.
        """
        order = self._order()
        windows, planned = itertools.tee(itertools.islice(self._rounds(order), max_rounds))
        mine = (window.rounds[0][self._ranks.index] for window in planned)
        batches = self._feed(self._fetch(order, (cell for cell in mine if cell.size or borrows)))
        for window in windows:
            cells = window.rounds[0]
            cell = cells[self._ranks.index]
            batch = next(batches) if cell.size or borrows else None
            yield Round(batch, cell.start, not all(cell.size for cell in cells), not cell.size)

    def close(self) -> None:
        """End worker processes, which otherwise wait for the next pass."""
        self._fetcher.close()

    def _micro_batches(
        self, window: Window, batches: Iterator[Any], weights: Sequence[float | None] | None = None
    ) -> Iterable[MicroBatch]:
        """Without `weights`, each batch weighs as much as it has of the samples of the update."""
        if self._ranks.count == self._accumulation_steps == 1 and weights is None:
            return (_only_batch_of_update(next(batches)),)
        return self._weighted_batches(window, batches, weights)

    def _weighted_batches(
        self, window: Window, batches: Iterator[Any], weights: Sequence[float | None] | None
    ) -> Iterator[MicroBatch]:
        ranks, total, last = self._ranks, window.size, len(window.rounds) - 1
        for index, cells in enumerate(window.rounds):
            size = cells[ranks.index].size
            weight = ranks.count * size / total if weights is None else weights[index]
            has_empty_rank = ranks.count > 1 and not all(cell.size for cell in cells)
            yield MicroBatch(next(batches), weight, index == last, not size, has_empty_rank)

    def _fetch(self, order: _EpochOrder, cells: Iterable[Cell]) -> Iterator[Any]:
        if self.is_vectorised:
            return self.waiting.over(self._fetcher.fetch_cells(order.indices, iter(cells)))
        return self.waiting.over(self._fetcher.fetch(self._request(order, cell) for cell in cells))

    def _request(self, order: _EpochOrder, cell: Cell) -> Request:
        span = slice(cell.start, cell.start + (cell.size or 1))
        if order.indices is None:
            indices: Any = range(span.start, span.stop)
        else:
            indices = order.indices[span]
        if isinstance(indices, torch.Tensor):
            indices = indices.tolist()  # a tensor would travel to a worker by way of shared memory
        # The position of its first sample names a batch whatever was done before it.
        return Request(indices, mixed_seed("batch", self._seed, self._epoch, cell.start))

    def _plan(self, order: _EpochOrder) -> TrainingPlan | BatchListPlan:
        if order.batches is not None:
            return BatchListPlan(order.batches, self._ranks.count, self._accumulation_steps)
        assert self.batch_size is not None
        return TrainingPlan(order.size, self.batch_size, self._ranks.count, self._accumulation_steps, self.drop_last)

    def _rounds(self, order: _EpochOrder) -> Iterator[Window]:
        if order.batches is not None:
            plan = BatchListPlan(order.batches, self._ranks.count, accumulation_steps=1)
            return plan.windows()
        assert self.batch_size is not None
        return evaluation_rounds(
            order.size, batch_size=self.batch_size, ranks=self._ranks.count, drop_last=self.drop_last
        )

    @property
    def _known_sizes(self) -> _EpochOrder:
        if self._sizes is None:
            self._sizes = self._order(sizes_only=True)
        return self._sizes

    def _order(self, *, sizes_only: bool = False) -> _EpochOrder:
        """The order of the current epoch; with `sizes_only` its indices may be missing."""
        size = len(self.dataset)  # type: ignore[arg-type]
        has_own_batches = self.batch_size is None
        if not has_own_batches and type(self.sampler) is SequentialSampler:
            return _EpochOrder(None, size, None)
        if not has_own_batches and _is_plain_shuffle(self.sampler):
            indices = None if sizes_only else epoch_order(size, seed=self._seed, epoch=self._epoch)
            return _EpochOrder(indices, size, None)
        if self._read_ahead is not None and self._read_ahead[0] == self._epoch:
            order = self._read_ahead[1]
        else:
            order = self._read_sampler(self.batch_sampler if has_own_batches else self.sampler)
        # A sampler may know how often it has been read, so what was read for its length is used for a pass too.
        self._read_ahead = (self._epoch, order) if sizes_only else None
        return order

    def _read_sampler(self, sampler: Any) -> _EpochOrder:
        """The order of a user's sampler or batch sampler in the current epoch."""
        parts = (sampler, getattr(sampler, "sampler", None))
        for part in parts:
            set_epoch = getattr(part, "set_epoch", None)
            if callable(set_epoch):
                set_epoch(self._epoch)
        if any(map(_is_distributed, parts)):
            rows = itertools.zip_longest(*self._ranks.exchange(self._read(self.batch_sampler)), fillvalue=[])
            batches = list(itertools.chain.from_iterable(rows))  # as `BatchListPlan` deals them
        else:
            # Each rank could draw another order.
            items = self._ranks.do_on_first(lambda: self._read(sampler))
            if self.batch_size is not None:
                return _EpochOrder(_as_indices(items), len(items), None)
            batches = [batch for batch in items if len(batch)]
        indices = _as_indices(list(itertools.chain.from_iterable(batches)))
        return _EpochOrder(indices, len(indices), [len(batch) for batch in batches])

    def _read(self, sampler: Any) -> list[Any]:
        with host_generators_seeded(mixed_seed("sampler", self._seed, self._epoch)):
            return list(sampler)


class StreamLoader:
    """Batches of an iterable on this rank, with or without a known length. Iterating over it yields one pass.

    Args:
        loader: yields host batches: a `DataLoader` over an `IterableDataset`, or any iterable of batches.
        ranks: the processes.
        seed: of the run.
        accumulation_steps: batches of a rank per update.
        feed: takes host batches to the trainer's device.
        is_sharded: whether the dataset gives each rank samples of its own.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        ranks: Ranks,
        *,
        seed: int,
        accumulation_steps: int = 1,
        feed: DeviceFeed,
        is_sharded: bool = False,
    ) -> None:
        self.dataset = getattr(loader, "dataset", None)
        self.batch_size: int | None = getattr(loader, "batch_size", None)
        self.drop_last = bool(getattr(loader, "drop_last", False))
        self.num_workers: int | None = getattr(loader, "num_workers", None)
        self.is_vectorised = False
        self._loader = loader
        self._ranks = ranks
        self._epoch = 0
        self._accumulation_steps = accumulation_steps
        self._feed = feed
        self._previous: Any = None  # the last batch of a rank that keeps step with others
        self.waiting = WaitingTime()
        self.is_sharded = is_sharded or not isinstance(self.dataset, IterableDataset)
        self._fetcher = StreamFetcher(loader, seed=seed, rank=ranks.index, ranks=ranks.count, is_sharded=is_sharded)

    @property
    def num_samples(self) -> int | None:
        """Samples of one pass over all ranks, where the dataset tells."""
        try:
            return len(self.dataset)  # type: ignore[arg-type]
        except TypeError:
            return None

    @property
    def num_updates(self) -> int | None:
        """Updates of one training pass, where the length is known."""
        try:
            return -(-len(self) // self._accumulation_steps)
        except TypeError:
            return None

    @property
    def num_batches(self) -> int | None:
        """Batches of this rank in one pass, where the length is known."""
        try:
            return len(self)
        except TypeError:
            return None

    def __len__(self) -> int:
        """Batches of this rank in one pass.

        Raises:
            TypeError: if the iterable does not tell.
        """
        batches = len(self._loader)  # type: ignore[arg-type]
        return batches if self.is_sharded else -(-batches // self._ranks.count)

    def __iter__(self) -> Iterator[Any]:
        return (batch for batch, _ in self._measured_batches(self._feed))

    @property
    def stateful(self) -> Any:
        """The dataset or loader that says where the stream is; None if nobody in this process can."""
        return self._fetcher.stateful

    def state_dict(self) -> dict[str, Any]:
        """Where this rank is in its stream, behind the last update. Only with something `stateful`."""
        state = self._fetcher.state_dict()
        return {
            **state,
            "state": None if state["state"] is None else {type(self.stateful).__name__: state["state"]},
            "workers": self.num_workers or 0,
            "batch_size": self.batch_size,
            "is_sharded": self.is_sharded or self.stateful is self._loader,
            "borrowed": self._previous,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on behind the update after which `state` was taken, without reading anything again."""
        inner = None if state["state"] is None else state["state"][type(self.stateful).__name__]
        self._fetcher.load_state_dict({**state, "state": inner})
        self._previous = state["borrowed"]

    def set_epoch(self, epoch: int) -> None:
        """Tell the iterable which pass comes next, if it wants to know; epochs count from 0."""
        self._epoch = epoch

    def updates(
        self, *, start: int = 0, max_batches: int | None = None, count_items: CountItems | None = None
    ) -> Iterator[Update]:
        """The updates of a training pass; see `PlannedLoader.updates`.

        The batches of an update are read ahead, so that all ranks know how many there are: in host memory, unless
        there is only one. Of a stream that says where it is, nothing further is read ahead.
        """
        if self._ranks.count == self._accumulation_steps == 1 and count_items is None and self.stateful is None:
            return itertools.islice(self._updates_of_one_batch(start), max_batches)
        return self._agreed_updates(start, max_batches, count_items)

    def _updates_of_one_batch(self, start: int) -> Iterator[Update]:
        position = 0
        for batch, size in self._measured_batches(self._feed):
            samples = 1 if size is None else size
            position += samples
            if position > start:
                yield Update((_only_batch_of_update(batch),), samples)

    def _agreed_updates(self, start: int, max_batches: int | None, count_items: CountItems | None) -> Iterator[Update]:
        is_fed_ahead = self._accumulation_steps == 1 and count_items is None and self.stateful is None
        batches = self._measured_batches(self._feed if is_fed_ahead else iter)
        left = sys.maxsize if max_batches is None else max(0, max_batches)
        position = start if self._fetcher.goes_on_in(self._epoch) else 0
        while True:
            # What has been used already may have been cut into other updates.
            wanted = 1 if position < start else min(self._accumulation_steps, left)
            measured = list(itertools.islice(batches, wanted))
            host, sizes = [batch for batch, _ in measured], [size for _, size in measured]
            numbers, samples = self._count(sizes)
            rounds = max(numbers)
            if rounds == 0:
                self._previous = None
                return
            if 0 in numbers and position == 0:
                raise self._no_batch_at_all(numbers)
            if not host and self._previous is None:
                raise DataError(
                    f"{_name(self._loader)} has no batch left on rank {self._ranks.index}, which keeps step with the "
                    "others by repeating its last one; but that is of a kind that the training state could not hold. "
                    "Go on from another state, or let batches be tensors, or tuples, lists and dicts of them."
                )
            host += [host[-1] if host else self._previous] * (rounds - len(host))
            self._previous = host[-1] if self._ranks.count > 1 else None
            weights = self._weights(host, sizes, samples, count_items)
            samples = rounds if samples is None else samples
            position += samples
            if position > start:
                left -= rounds
                fed = iter(host) if is_fed_ahead else self._feed(iter(host))
                yield Update(self._micro_batches(fed, weights, numbers), samples)

    def _no_batch_at_all(self, by_rank: list[int]) -> DataError:
        return DataError(
            f"Some rank got no batch at all from {_name(self._loader)} (by rank: {by_rank}). Every rank needs one to "
            "keep step with the others; use fewer ranks, smaller batches or more data."
        )

    def _count(self, sizes: list[int | None]) -> tuple[list[int], int | None]:
        """Of the next update: how many batches each rank has, and the samples of all of them where that is known."""
        samples = sum(size or 0 for size in sizes)
        if self._ranks.count == 1:
            return [len(sizes)], None if None in sizes else samples
        everyones = self._ranks.exchange_numbers([len(sizes), samples, None in sizes])
        is_known = not any(unknown for _, _, unknown in everyones)
        total = sum(samples for _, samples, _ in everyones)
        return [number for number, _, _ in everyones], total if is_known else None

    def rounds(self, *, max_rounds: int | None = None, borrows: bool = False) -> Iterator[Round]:
        """The rounds of an evaluation or prediction pass: every sample once; see `PlannedLoader.rounds`."""
        batches = itertools.islice(self._measured_batches(self._feed), max_rounds)
        return self._own_rounds(batches) if self._ranks.count == 1 else self._agreed_rounds(batches, borrows)

    def _own_rounds(self, batches: Iterator[tuple[Any, int | None]]) -> Iterator[Round]:
        position = 0
        for batch, size in batches:
            yield Round(batch, position, False)
            position += 1 if size is None else size

    def _agreed_rounds(self, batches: Iterator[tuple[Any, int | None]], borrows: bool) -> Iterator[Round]:
        position = 0
        previous: Any = None
        while True:
            batch, size = next(batches, (None, 0))
            sizes = [size for (size,) in self._ranks.exchange_numbers([1 if size is None else size])]
            if not any(sizes):
                return
            if borrows and position == 0 and not all(sizes):
                raise self._no_batch_at_all(sizes)
            start = position + sum(sizes[: self._ranks.index])
            previous = batch if size != 0 else previous if borrows else None
            yield Round(previous, start, not all(sizes), size == 0)
            position += sum(sizes)

    def close(self) -> None:
        """End worker processes, which otherwise wait for the next pass."""
        self._fetcher.close()

    def _measured_batches(self, feed: DeviceFeed) -> Iterator[tuple[Any, int | None]]:
        """The batches of a pass and their sizes; an empty one would be one too many for most models."""
        samples, expected = 0, self.num_samples if isinstance(self.dataset, IterableDataset) else None
        for batch in feed(self.waiting.over(self._fetcher.fetch(self._epoch))):
            size = batch_size_of(batch)
            if size != 0:
                yield batch, size
            samples += size or 0
            if expected is not None and samples > expected:
                warnings.warn(
                    f"{_name(self.dataset)} says that it has {expected} samples but yields more. With several workers "
                    "each yields the whole stream, unless the dataset asks `torch.utils.data.get_worker_info()` for "
                    "its share: use num_workers=1, or share it out there.",
                    stacklevel=2,
                )
                expected = None

    def _weights(
        self, host: list[Any], sizes: list[int | None], total: int | None, count_items: CountItems | None
    ) -> Sequence[float | None]:
        """The weights of the batches of an update; those behind the end of `sizes` are borrowed."""
        borrowed = [0] * (len(host) - len(sizes))
        if count_items is not None:
            counts = [count_items(batch) for batch in host[: len(sizes)]]
            return item_weights(self._ranks, [*counts, *borrowed], [*sizes, *borrowed])
        if total is None:
            return [None] * len(host)
        return [self._ranks.count * (size or 0) / total for size in [*sizes, *borrowed]]

    def _micro_batches(
        self, batches: Iterator[Any], weights: Sequence[float | None], numbers: list[int]
    ) -> Iterator[MicroBatch]:
        """`numbers`: of batches on each rank."""
        last = len(weights) - 1
        for index, batch in enumerate(batches):
            is_borrowed = index >= numbers[self._ranks.index]
            has_empty_rank = index >= min(numbers)
            yield MicroBatch(batch, weights[index], index == last, is_borrowed, has_empty_rank)


RunLoader = PlannedLoader | StreamLoader


def item_weights(ranks: Ranks, counts: Sequence[int | None], sizes: Sequence[int | None]) -> Sequence[float | None]:
    """The weights of this rank's batches in an update, from the number of items in each.

    Where some rank cannot tell (None), samples count instead. Must be called by all ranks.

    Raises:
        DataError: if no rank has any item.
    """
    numbers: Sequence[int | None] = counts
    if ranks.any(None in counts):
        numbers = sizes
        if ranks.any(None in sizes):
            return [None] * len(counts)
    (total,) = ranks.sum([sum(number or 0 for number in numbers)])
    if total == 0:
        raise DataError(
            "An update has no items at all: `count_batch_items` returned 0 for each of its batches. A mean over "
            "nothing is not defined; leave such batches out of the dataset."
        )
    return [ranks.count * (number or 0) / total for number in numbers]


def batch_size_of(batch: Any) -> int | None:
    """The first dimension of the first tensor or array in `batch`, or None if it has none."""
    if type(batch) in (list, tuple) and batch and isinstance(batch[0], torch.Tensor) and batch[0].ndim:
        return batch[0].shape[0]  # the answer for most batches, without a search
    if isinstance(batch, Mapping):
        parts: Iterable[Any] = batch.values()
    elif isinstance(batch, (tuple, list)):
        parts = batch
    else:
        shape = getattr(batch, "shape", None)
        return int(shape[0]) if shape else None
    return next((size for size in map(batch_size_of, parts) if size is not None), None)


def adapt_loader(
    loader: Any,
    ranks: Ranks,
    *,
    seed: int,
    accumulation_steps: int = 1,
    feed: DeviceFeed,
    is_sharded: bool = False,
) -> RunLoader:
    """Whatever yields batches as a loader of this run.

    Raises:
        ArgumentTypeError: if `loader` cannot be iterated over.
    """
    if isinstance(loader, RunLoader):
        return loader
    if not isinstance(loader, Iterable) and not hasattr(loader, "__getitem__"):
        raise ArgumentTypeError(
            f"A {type(loader).__name__} cannot be used as a loader: it cannot be iterated over. Return a DataLoader or "
            "another iterable of batches."
        )
    is_torch_loader = isinstance(loader, DataLoader) and (
        type(loader).__iter__ is DataLoader.__iter__ or is_stateful_loader(loader)
    )
    settings: dict[str, Any] = {"seed": seed, "accumulation_steps": accumulation_steps, "feed": feed}
    if is_torch_loader and not isinstance(loader.dataset, IterableDataset) and loader.batch_sampler is not None:
        return PlannedLoader(loader, ranks, **settings)
    is_stream = is_torch_loader and isinstance(loader.dataset, IterableDataset)
    if ranks.count > 1 and not is_stream and not is_sharded and ranks.is_first:
        warnings.warn(
            f"{_name(loader)} is used on each of the {ranks.count} ranks as it is: it must yield different batches on "
            "each. Pass a map-style dataset or a torch DataLoader to have its samples shared out, or `is_sharded=True` "
            "among the loader's arguments if all is well.",
            stacklevel=2,
        )
    return StreamLoader(loader, ranks, is_sharded=is_sharded, **settings)


def close_loader(loader: Any) -> None:
    """End the worker processes of `loader`, if it is one of a run."""
    loader, _ = unsliced(loader)
    if isinstance(loader, RunLoader):
        loader.close()


def refuse_empty(loader: RunLoader, purpose: str) -> None:
    """Refuse a loader that is known to have no batches.

    Raises:
        DataError: saying that there is nothing to `purpose`, for example "train on".
    """
    if loader.num_batches == 0:
        raise empty_loader_error(loader, purpose)


def refuse_rearranged(loader: RunLoader) -> None:
    """Refuse to predict for a loader whose rows nobody could match with their samples.

    Raises:
        ConfigurationError: if it shuffles, or leaves samples out.
    """
    is_shuffled = isinstance(loader, PlannedLoader) and _is_plain_shuffle(loader.sampler)
    if is_shuffled or loader.drop_last:
        raise ConfigurationError(
            f"Predictions come in the order of the dataset, one for each sample, but the loader "
            f"{'shuffles' if is_shuffled else 'leaves out samples at the end (drop_last=True)'}. Pass the dataset "
            "itself, or a loader without that."
        )


def empty_loader_error(loader: Any, purpose: str) -> DataError:
    """What to raise where `loader` yields no batches."""
    loader, _ = unsliced(loader)
    dataset = getattr(loader, "dataset", None)
    source = loader._loader if isinstance(loader, StreamLoader) else loader
    iterators = [type(part).__name__ for part in (source, dataset) if isinstance(part, Iterator)]
    used_up = (
        f" It is an iterator ({iterators[0]}), which is used up after one pass: pass something that can be iterated "
        "over again."
        if iterators
        else ""
    )
    of_dataset = "" if dataset is None else f" of the {type(dataset).__name__}"
    names = {"num_samples": "samples", "batch_size": "batch size", "drop_last": "drop_last"}
    facts = {word: getattr(loader, name, None) for name, word in names.items()}
    shown = ", ".join(f"{word}: {value}" for word, value in facts.items() if value is not None)
    return DataError(
        f"There is nothing to {purpose}: the loader{of_dataset} yields no batches{f' ({shown})' if shown else ''}. "
        f"Check the length of the data, the batch size and `drop_last`.{used_up}"
    )


def fingerprint(loader: RunLoader) -> str:
    """A few words about a loader's dataset that must be the same on every rank."""
    if isinstance(loader, StreamLoader) and loader.is_sharded:
        return "a share of its own"
    parts: list[str] = [str(loader.num_samples)]
    dataset = loader.dataset
    while isinstance(dataset, Subset):
        parts.append(hashlib.sha256(repr(list(dataset.indices)).encode()).hexdigest())
        dataset = dataset.dataset
    return " ".join(parts)


_RANDOM_SAMPLER_OF_STATEFUL_LOADER = ("torchdata.stateful_dataloader.sampler", "RandomSampler")


def _is_plain_shuffle(sampler: Any) -> bool:
    kind = type(sampler)
    is_random = kind is RandomSampler or (kind.__module__, kind.__name__) == _RANDOM_SAMPLER_OF_STATEFUL_LOADER
    return is_random and not sampler.replacement and sampler._num_samples is None


def _is_distributed(sampler: Any) -> bool:
    return hasattr(sampler, "num_replicas") and hasattr(sampler, "rank")


def _as_indices(indices: list[Any]) -> Any:
    """Whole numbers of any kind as a tensor, other keys as they are."""
    try:
        return torch.tensor([operator.index(index) for index in indices], dtype=torch.int64)
    except TypeError:
        return indices


def _name(loader: Any) -> str:
    return f"the {type(loader).__name__}"
