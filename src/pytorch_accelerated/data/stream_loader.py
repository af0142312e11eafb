"""The `RunLoader` of data that can only be iterated over, whose number of batches may be unknown."""

from __future__ import annotations

import itertools
import sys
import warnings
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch.utils.data import IterableDataset

from pytorch_accelerated.data.fetching import StreamFetcher
from pytorch_accelerated.data.prefetch import DeviceFeed
from pytorch_accelerated.data.shares import Shares, total_of
from pytorch_accelerated.data.updates import (
    CountItems,
    ItemCounter,
    ItemWeight,
    MicroBatch,
    Round,
    RunLoader,
    Update,
    items_of,
)
from pytorch_accelerated.errors import DataError
from pytorch_accelerated.processes.ranks import Ranks
from pytorch_accelerated.trees import count_rows


class StreamLoader(RunLoader):
    """Batches of an iterable on this rank, with or without a known length.

    `is_sharded` says that the dataset already gives each rank different samples, and `batches` yields the batches of
    `loader` (default: `loader` itself). For the other arguments see `RunLoader`.
    """

    _fetcher: StreamFetcher

    def __init__(
        self,
        loader: Iterable[Any],
        ranks: Ranks,
        *,
        seed: int,
        accumulation_steps: int,
        feed: DeviceFeed,
        is_sharded: bool,
        batches: Iterable[Any] | None = None,
    ) -> None:
        super().__init__(loader, ranks, seed=seed, accumulation_steps=accumulation_steps, feed=feed)
        self._previous: Any = None  # with several ranks, the last batch, which may be borrowed to stay in step
        self._has_stream = isinstance(self.dataset, IterableDataset)
        self.is_sharded = is_sharded or not self._has_stream
        self._fetcher = StreamFetcher(
            loader if batches is None else batches,
            seed=seed,
            rank=ranks.index,
            ranks=ranks.count,
            is_sharded=is_sharded,
        )

    @property
    def num_samples(self) -> int | None:
        try:
            return len(self.dataset)
        except TypeError:
            return None

    @property
    def num_batches(self) -> int | None:
        try:
            return len(self)
        except TypeError:
            return None

    def __len__(self) -> int:
        batches = len(self.source)  # type: ignore[arg-type]
        return self._at_most(batches if self.is_sharded else -(-batches // self._ranks.count))

    def __iter__(self) -> Iterator[Any]:
        return (batch for batch, _ in itertools.islice(self._measured_batches(self._feed), self.max_batches))

    @property
    def stateful(self) -> Any:
        """The dataset or loader that knows the position in the stream; None if none in this process does."""
        return self._fetcher.stateful

    def state_dict(self) -> dict[str, Any]:
        """This rank's position in its stream, after the last update. Requires `stateful`."""
        state = self._fetcher.state_dict()
        return {
            **state,
            "state": None if state["state"] is None else {type(self.stateful).__name__: state["state"]},
            "workers": self.num_workers or 0,
            "batch_size": self.batch_size,
            "is_sharded": self.is_sharded or self.stateful is self.source,
            "borrowed": self._previous,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after the update at which `state` was taken, without reading anything again."""
        inner = None if state["state"] is None else state["state"][type(self.stateful).__name__]
        self._fetcher.load_state_dict({**state, "state": inner})
        self._previous = state["borrowed"]

    def updates(
        self, *, start: int = 0, batches_done: int = 0, count_items: CountItems | None = None
    ) -> Iterator[Update]:
        """The updates of a training pass; see `RunLoader.updates`.

        All batches of an update are read ahead, into host memory unless there is only one, so that all ranks know how
        many there are. If the stream knows its position, nothing else is read ahead.
        """
        is_fed_ahead = self._accumulation_steps == 1 and count_items is None and self.stateful is None
        if is_fed_ahead and self._ranks.count == 1:
            return itertools.islice(self._updates_of_one_batch(start), self._batches_left(batches_done))
        return self._agreed_updates(start, self._batches_left(batches_done), count_items, is_fed_ahead)

    def _updates_of_one_batch(self, start: int) -> Iterator[Update]:
        position = 0
        for batch, size in self._measured_batches(self._feed):
            samples = 1 if size is None else size
            position += samples
            if position > start:
                yield Update((MicroBatch(batch),), samples)

    def _agreed_updates(
        self, start: int, batches_left: int | None, count_items: CountItems | None, is_fed_ahead: bool
    ) -> Iterator[Update]:
        batches = self._measured_batches(self._feed if is_fed_ahead else iter)
        left = sys.maxsize if batches_left is None else batches_left
        position = start if self._fetcher.resumes_within(self._epoch) else 0
        shares = self._shares(self._accumulation_steps)
        while True:
            # Used samples may have been divided into updates differently.
            wanted = min(1 if position < start else self._accumulation_steps, left)
            measured = list(itertools.islice(batches, wanted))
            host, sizes = [batch for batch, _ in measured], [size for _, size in measured]
            everyones = shares.exchange(sizes, left - wanted)
            numbers, samples = [share.batches for share in everyones], total_of(everyones)
            rounds = max(numbers)
            if rounds == 0:
                self._previous = None
                return
            if 0 in numbers and position == 0:
                raise self._no_batch_at_all(numbers)
            if not host and self._previous is None:
                raise DataError(
                    f"The {type(self.source).__name__} has no batch left on rank {self._ranks.index}, which would stay "
                    "in step with the others by repeating its last one. That batch is of a type that the training "
                    "state could not hold. Resume from another state, or make batches of tensors, or of tuples, lists "
                    "and dicts of them."
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
            f"At least one rank got no batch at all from the {type(self.source).__name__} (by rank: {by_rank}). Every "
            "rank needs one to stay in step with the others; use fewer ranks, smaller batches or more data."
        )

    def _shares(self, batches: int) -> Shares:
        return Shares(self._ranks, batches, lambda: self._fetcher.batches_in_memory)

    def _weights(
        self, host: list[Any], sizes: list[int | None], total: int | None, count_items: CountItems | None
    ) -> Sequence[ItemWeight]:
        """The weights of the batches of an update; those after the end of `sizes` are borrowed."""
        borrowed = [0] * (len(host) - len(sizes))
        if count_items is not None:
            counts = [items_of(batch, count_items) for batch in host[: len(sizes)]]
            return self._weights_of_items([*counts, *borrowed], [*sizes, *borrowed])
        if total is None:
            return [ItemWeight(None)] * len(host)
        return [ItemWeight(self._ranks.count * (size or 0) / total) for size in [*sizes, *borrowed]]

    def _micro_batches(
        self, batches: Iterator[Any], weights: Sequence[ItemWeight], numbers: list[int]
    ) -> Iterator[MicroBatch]:
        """The batches of an update, given their number on each rank."""
        last = len(weights) - 1
        for index, batch in enumerate(batches):
            is_borrowed = index >= numbers[self._ranks.index]
            has_empty_rank = index >= min(numbers)
            weight, items = weights[index]
            yield MicroBatch(batch, weight, index == last, is_borrowed, has_empty_rank, items)

    def rounds(self, *, borrows: bool = False, count_items: CountItems | None = None) -> Iterator[Round]:
        counter = ItemCounter(count_items)
        batches = itertools.islice(self._measured_batches(self._feed, counter), self.max_batches)
        if self._ranks.count == 1:
            return self._own_rounds(batches, counter)
        return self._agreed_rounds(batches, counter, borrows)

    def _own_rounds(self, batches: Iterator[tuple[Any, int | None]], counter: ItemCounter) -> Iterator[Round]:
        position = 0
        for batch, size in batches:
            yield Round(batch, position, False, items=counter.items)
            position += 1 if size is None else size

    def _agreed_rounds(
        self, batches: Iterator[tuple[Any, int | None]], counter: ItemCounter, borrows: bool
    ) -> Iterator[Round]:
        position = 0
        previous: Any = None
        shares = self._shares(1)
        left = sys.maxsize if self.max_batches is None else self.max_batches
        while True:
            batch, size = next(batches, (None, 0))
            left -= 1
            everyones = shares.exchange([] if size == 0 else [size], left)
            sizes = [share.batches if share.samples is None else share.samples for share in everyones]
            if not any(sizes):
                return
            if borrows and position == 0 and not all(sizes):
                raise self._no_batch_at_all(sizes)
            start = position + sum(sizes[: self._ranks.index])
            previous = batch if size != 0 else previous if borrows else None
            yield Round(previous, start, not all(sizes), size == 0, counter.items)
            position += sum(sizes)

    def _measured_batches(
        self, feed: DeviceFeed, counter: ItemCounter | None = None
    ) -> Iterator[tuple[Any, int | None]]:
        """The batches of a pass and their sizes, without empty ones, which most models can't handle."""
        counter = counter or ItemCounter(None)
        samples, expected = 0, self.num_samples if self._has_stream else None
        # Otherwise a pass may yield less: the share of a rank, the rest after a resume, or only full batches.
        is_whole = self._ranks.count == 1 and not self._fetcher.resumes_within(self._epoch)
        is_whole &= not getattr(self.source, "drop_last", False)
        for batch in feed(counter.over(self.waiting.over(self._fetcher.fetch(self._epoch)))):
            counter.advance()
            size = count_rows(batch)
            if size != 0:
                yield batch, size
            samples += size or 0
            is_whole &= size is not None
            if expected is not None and samples > expected:
                warnings.warn(
                    f"The {type(self.dataset).__name__} says that it has {expected} samples but yields more. With "
                    "several workers each yields the whole stream, unless the dataset divides it by means of "
                    "`torch.utils.data.get_worker_info()`: do this, or use num_workers=1.",
                    stacklevel=2,
                )
                expected = None
        if is_whole and expected is not None and 0 < samples < expected:
            warnings.warn(
                f"The {type(self.dataset).__name__} says that it has {expected} samples but yields {samples}. The "
                "number of updates of a run and the schedule of its learning rate depend on this number: correct "
                "`__len__`.",
                stacklevel=2,
            )
