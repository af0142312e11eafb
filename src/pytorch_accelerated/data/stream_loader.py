"""The `RunLoader` of data that can only be iterated over, whose number of batches may be unknown."""

from __future__ import annotations

import itertools
import time
import warnings
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from torch.utils.data import IterableDataset

from pytorch_accelerated.data.counting import Counter, with_items
from pytorch_accelerated.data.streams import StreamFetcher
from pytorch_accelerated.data.updates import DeviceFeed, ItemWeights, MicroBatch, Round, RunLoader, Update
from pytorch_accelerated.errors import DataError
from pytorch_accelerated.facts.accumulation import Accumulation
from pytorch_accelerated.facts.trees import count_rows
from pytorch_accelerated.ranks.ranks import Ranks

_UNKNOWN = -1  # in messages between ranks


class _Measured(NamedTuple):
    """A batch; `size` is for weights and positions: rows of its first tensor if nobody counts samples."""

    batch: Any
    size: int | None
    samples: int | None
    items: int | None = None


class StreamLoader(RunLoader):
    """Batches of an iterable on this rank, with or without a known length.

    `is_sharded` says that the dataset already gives each rank different samples. For the other arguments see
    `RunLoader`.
    """

    _fetcher: StreamFetcher

    def __init__(self, loader: Iterable[Any], ranks: Ranks, *, is_sharded: bool, **settings: Any) -> None:
        super().__init__(loader, ranks, **settings)
        self._previous: Any = None  # with multiple ranks, the last batch, which may be borrowed to stay in step
        self._has_stream = isinstance(self.dataset, IterableDataset)
        self.is_sharded = is_sharded or not self._has_stream
        place = (0, 1) if is_sharded else (ranks.index, ranks.count)
        self._fetcher = StreamFetcher(loader, *place, seed=self.seed)

    def __len__(self) -> int:
        batches = len(self.source)  # type: ignore[arg-type]
        return min(batches if self.is_sharded else -(-batches // self._ranks.count), self.max_batches)

    def __iter__(self) -> Iterator[Any]:
        return (batch for batch, *_ in itertools.islice(self._measured_batches(self._feed), self.max_batches))

    @property
    def stateful(self) -> Any:
        """The dataset or loader that knows the position in the stream; None if none in this process does."""
        return self._fetcher.stateful

    @property
    def division(self) -> dict[str, Any]:
        """What decides which samples of the stream each rank and worker gets, besides the number of ranks."""
        return {
            "workers": self.num_workers or 0,
            "batch_size": self.batch_size,
            "is_sharded": self.is_sharded or (self.stateful is not None and self.stateful is self.source),
        }

    def state_dict(self) -> dict[str, Any]:
        """This rank's position in its stream, after the last update; without `stateful`, the `division` alone."""
        if self.stateful is None:
            return self.division
        state = self._fetcher.state_dict()
        inner = None if state["state"] is None else {type(self.stateful).__name__: state["state"]}
        return {**state, **self.division, "state": inner, "borrowed": self._previous}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after the update at which `state` was taken, without reading anything again."""
        inner = None if state["state"] is None else state["state"][type(self.stateful).__name__]
        self._fetcher.load_state_dict({**state, "state": inner})
        self._previous = state["borrowed"]

    def batches(
        self, *, start: int = 0, batches_done: int = 0, count_items: Counter | None = None
    ) -> Iterator[MicroBatch]:
        """The batches of a training pass; see `RunLoader.batches`.

        All batches of an update are read ahead, into host memory unless there is only one, so that all ranks know how
        many there are. If the stream knows its position, nothing else is read ahead.
        """
        is_fed_ahead = self.accumulation == Accumulation() and count_items is None and self.stateful is None
        batches = self._measured_batches(self._feed if is_fed_ahead else iter)
        left = max(0, self.max_batches - batches_done)
        wanted_by_update = self.accumulation.sizes(batches_done)
        position = start if self._fetcher.resumes_within(self._epoch) else 0
        while True:
            # Used samples may have been divided into updates differently.
            wanted = min(1 if position < start else next(wanted_by_update), left)
            began = time.perf_counter()
            measured = list(itertools.islice(batches, wanted))
            self.waiting.seconds += time.perf_counter() - began
            host, sizes = [each.batch for each in measured], [each.size for each in measured]
            # Ranks agree before each update, because the stream of one may end before the others'.
            numbers, samples_by_rank = self._exchange(sizes)
            total = None if None in samples_by_rank else sum(filter(None, samples_by_rank))
            rounds = max(numbers)
            if rounds == 0:
                self._previous = None
                return
            if position == 0:
                self._refuse_no_batch_at_all(numbers)
            # A rank that has fewer batches computes its last one again, which doesn't count, to stay in step.
            host += [host[-1] if host else self._previous] * (rounds - len(host))
            self._previous = host[-1] if self._ranks.count > 1 else None
            position += rounds if total is None else total
            if position > start:  # others were used before: they may have no items without the rest of their update
                weights, items = self._weights(host, sizes, total, count_items)
                left -= rounds
                fed = iter(host) if is_fed_ahead else self._feed(iter(host))
                counts = [each.samples for each in measured] + [None] * (rounds - len(measured))
                update = Update(rounds if total is None else total, items)
                for index, (batch, samples) in enumerate(zip(fed, counts, strict=True)):
                    weight, counted = weights[index]
                    yield MicroBatch(
                        batch,
                        samples,
                        weight,
                        is_last=index == rounds - 1,
                        is_borrowed=index >= numbers[self._ranks.index],
                        has_empty_rank=index >= min(numbers),
                        items=counted,
                        update=update,
                    )

    def _refuse_no_batch_at_all(self, by_rank: list[int]) -> None:
        if 0 in by_rank:
            raise DataError(
                f"At least one rank got no batch at all from the {type(self.source).__name__} (by rank: {by_rank}). "
                "Every rank needs one to stay in step with the others; use fewer ranks, smaller batches or more data."
            )

    def _exchange(self, sizes: Sequence[int | None]) -> tuple[list[int], list[int | None]]:
        """How many batches each rank has for an update or a round, and their samples; None if unknown."""
        samples = None if None in sizes else sum(filter(None, sizes))
        if self._ranks.count == 1:
            return [len(sizes)], [samples]
        by_rank = self._ranks.exchange_numbers([len(sizes), _UNKNOWN if samples is None else samples])
        return [batches for batches, _ in by_rank], [None if each == _UNKNOWN else each for _, each in by_rank]

    def _weights(
        self, host: list[Any], sizes: list[int | None], total: int | None, count_items: Counter | None
    ) -> tuple[ItemWeights, tuple[int, int] | None]:
        """The weights of the batches of an update, and its items; batches after the end of `sizes` are borrowed."""
        borrowed = [0] * (len(host) - len(sizes))
        if count_items is not None:
            counts = [count_items.items_of(batch, size) for batch, size in zip(host, sizes, strict=False)]
            numbers = [*counts, *borrowed], [*sizes, *borrowed]
            return self._weights_of_items(*numbers, are_tokens=count_items.are_tokens)
        if total is None:
            return [(1.0 if len(host) == self._ranks.count == 1 else None, None)] * len(host), None
        return [(self._ranks.count * (size or 0) / total, None) for size in [*sizes, *borrowed]], None

    def rounds(self, *, borrows: bool = False, count_items: Counter | None = None) -> Iterator[Round]:
        batches = itertools.islice(self._measured_batches(self._feed, count_items), self.max_batches)
        position = 0
        previous: Any = None
        while True:
            began = time.perf_counter()
            batch, size, samples, items = next(batches, _Measured(None, 0, None))
            self.waiting.seconds += time.perf_counter() - began
            numbers, samples_by_rank = self._exchange([] if size == 0 else [size])
            sizes = [number if each is None else each for number, each in zip(numbers, samples_by_rank, strict=True)]
            if not any(sizes):
                return
            if borrows and position == 0:
                self._refuse_no_batch_at_all(sizes)
            start = position + sum(sizes[: self._ranks.index])
            previous = batch if size != 0 else previous if borrows else None
            if count_items is not None and count_items.counts_rows:
                samples = items
            yield Round(previous, start, samples, not all(sizes), size == 0, items)
            position += sum(sizes)

    def _measured_batches(self, feed: DeviceFeed, count_items: Counter | None = None) -> Iterator[_Measured]:
        """The batches of a pass, without empty ones, which most models can't handle."""
        seen, expected = 0, self.num_samples if self._has_stream else None
        # Otherwise a pass may yield less: the share of a rank, the rest after a resume, or only full batches.
        is_whole = self._ranks.count == 1 and not self._fetcher.resumes_within(self._epoch)
        is_whole &= not getattr(self.source, "drop_last", False)
        fetched: Iterator[Any] = self._fetcher.fetch(self._epoch)
        if count_items is not None:
            fetched = with_items(fetched, count_items)
        for batch, samples, *items in feed(fetched):
            size = count_rows(batch) if samples is None else samples
            if size != 0:
                yield _Measured(batch, size, samples, *items)
            seen += size or 0
            is_whole &= size is not None
        if is_whole and seen and expected not in (None, seen):
            warnings.warn(
                f"The {type(self.dataset).__name__} says that it has {expected} samples but yields {seen}. Correct "
                "`__len__`; if there are multiple workers, divide the stream by `get_worker_info()` of torch.",
                stacklevel=2,
            )
