"""The `RunLoader` of map-style data.

A torch `DataLoader` serves as a description (dataset, sampler, sizes, workers, collation). We use our own order, which
is a pure function of (seed, epoch), so every rank knows the size of every batch in advance.

A window is one update over all ranks. It has rounds, of one cell per rank: the positions of a batch. See `sampling`.
"""

from __future__ import annotations

import copy
import itertools
import operator
import time
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader

from pytorch_accelerated.data.counting import Counter, with_items
from pytorch_accelerated.data.ordering import EpochOrder, EpochOrders, LeftOut
from pytorch_accelerated.data.rows import BatchFetcher, Request
from pytorch_accelerated.data.sampling import (
    BatchListPlan,
    Cell,
    TrainingPlan,
    Window,
    evaluation_rounds,
    laid_out,
)
from pytorch_accelerated.data.updates import ItemWeights, MicroBatch, Round, RunLoader, Update
from pytorch_accelerated.facts.seeding import seeds_of_batches
from pytorch_accelerated.ranks.ranks import Ranks


class PlannedLoader(RunLoader):
    """Batches of a map-style dataset on this rank, in the order of `set_epoch`. For the arguments see `RunLoader`."""

    _fetcher: BatchFetcher

    def __init__(self, loader: DataLoader[Any], ranks: Ranks, *, lanes: int | None = None, **settings: Any) -> None:
        super().__init__(loader, ranks, **settings)
        self.lanes = lanes
        self._orders = EpochOrders(loader, ranks, seed=self.seed)
        self._fetcher = BatchFetcher(loader, seed=self.seed)
        self.is_shuffled = self._orders.is_shuffled
        self.is_vectorised = self._fetcher.is_vectorised

    @property
    def num_samples(self) -> int:
        return len(self._orders.sizes(self._epoch).indices)

    @property
    def num_batches(self) -> int:
        return min(self._plan(self._orders.sizes(self._epoch)).num_batches, self.max_batches)

    def indices(self, start: int, stop: int) -> list[int] | None:
        order = self._orders.known(self._epoch)
        return None if order is None else order.rows(start, stop)  # a sampler may not be read twice

    def count_updates(self) -> int:
        # `num_batches` may know only an earlier epoch of a user's sampler; this reads it for the current one.
        self._orders.sizes(self._epoch, is_exact=True)
        return self.accumulation.updates(self.num_batches)

    def leave_out(self, left_out: Iterable[LeftOut]) -> None:
        self._orders.leave_out(left_out)

    def detached(self, ranks: Any = None) -> PlannedLoader:
        detached = copy.copy(self)
        detached._orders = self._orders.detached()
        detached._ranks = ranks or self._ranks
        return detached

    def windows(
        self, start: int = 0, batches_done: int = 0, *, needs_rows: bool = True
    ) -> tuple[EpochOrder, Iterator[Window]]:
        """The order of the epoch and its updates from `start` on; see `batches`. Must be called by all ranks.

        Without `needs_rows`, the order may have the right size and other rows.
        """
        order = self._orders.of(self._epoch) if needs_rows else self._orders.sizes(self._epoch, is_exact=True)
        windows = self._plan(order).windows(start, self.max_batches - batches_done)
        return order, windows if self.lanes is None else (laid_out(each, ranks=self._ranks.count) for each in windows)

    def __len__(self) -> int:
        return self.num_batches

    def __iter__(self) -> Iterator[Any]:
        return (micro.batch for micro in self.batches() if not micro.is_borrowed)

    def batches(
        self, *, start: int = 0, batches_done: int = 0, count_items: Counter | None = None
    ) -> Iterator[MicroBatch]:
        order, all_windows = self.windows(start, batches_done)
        # The same windows twice: fetching runs ahead in one of them, the loop follows in the other.
        windows, planned = itertools.tee(all_windows)
        host_batches = self._fetch(order, planned, borrows=True)
        batches = self._feed(host_batches) if count_items is None else iter(())
        ranks, rank, mean_is_over = self._ranks.count, self._ranks.index, self.mean_is_over
        weights: ItemWeights | None = None
        items = None
        for window in windows:
            if count_items is not None:
                # The first weight needs the items of the last batch, so the whole update is read into host memory.
                sizes = [cells[rank].size for cells in window.rounds]
                began = time.perf_counter()
                host = list(itertools.islice(host_batches, len(sizes)))
                self.waiting.seconds += time.perf_counter() - began
                pairs = zip(host, sizes, strict=True)
                counts = [count_items.items_of(batch, size) if size else 0 for batch, size in pairs]
                # Where the only rank has all rows that it asked for, the planned weights are right.
                is_planned = ranks == 1 and count_items.counts_rows and counts == sizes
                weights, items = None, None
                if not is_planned:
                    weights, items = self._weights_of_items(counts, sizes, are_tokens=count_items.are_tokens)
                batches = self._feed(iter(host))
            has_rows = weights is not None and count_items is not None and count_items.counts_rows
            update, last = Update(window.size, items, window), len(window.rounds) - 1
            for index, cells in enumerate(window.rounds):
                began = time.perf_counter()
                batch = next(batches)
                self.waiting.seconds += time.perf_counter() - began
                size = cells[rank].size
                # A batch counts by its share of the rows.
                weight, counted = (mean_is_over * size / window.size, None) if weights is None else weights[index]
                has_empty_rank = ranks > 1 and not all(cell.size for cell in cells)
                samples = counted if has_rows and size else size or 1  # a borrowed batch has one
                yield MicroBatch(batch, samples, weight, index == last, not size, has_empty_rank, counted, update)

    def rounds(self, *, borrows: bool = False, count_items: Counter | None = None) -> Iterator[Round]:
        order = self._orders.of(self._epoch)
        rounds: Iterator[Window] = itertools.islice(self._rounds(order), self.max_batches)
        if self.lanes is not None:
            whole = (laid_out(each, ranks=self._ranks.count) for each in rounds)
            rounds = (Window(each.start, each.size, (cells,)) for each in whole for cells in each.rounds)
        windows, planned, measured = itertools.tee(rounds, 3)
        sizes: Iterator[int] = (cells[self._ranks.index].size for window in measured for cells in window.rounds)
        sized = zip(
            self._fetch(order, planned, borrows=borrows), sizes if borrows else filter(None, sizes), strict=False
        )
        batches = self._feed(with_items(sized, count_items))
        for window in windows:
            (cells,) = window.rounds
            start, size = cells[self._ranks.index]
            began = time.perf_counter()
            batch, _, items = next(batches) if size or borrows else (None, None, None)
            self.waiting.seconds += time.perf_counter() - began
            has_empty_rank = self._ranks.count > 1 and not all(cell.size for cell in cells)
            samples = items if count_items is not None and count_items.counts_rows and size else size or 1
            yield Round(batch, start, samples, has_empty_rank, not size, items)

    def _fetch(self, order: EpochOrder, windows: Iterator[Window], *, borrows: bool) -> Iterator[Any]:
        """This rank's host batches, one sample in place of an empty cell if it `borrows`, else none."""
        # `itertools` and `operator` run in C; a generator of ours would cost a Python call per batch.
        rounds = itertools.chain.from_iterable(map(operator.attrgetter("rounds"), windows))
        cells: Iterator[Cell] = map(operator.itemgetter(self._ranks.index), rounds)
        if not borrows:
            cells = filter(operator.attrgetter("size"), cells)
        if self.is_vectorised:
            return self._fetcher.fetch_cells(order.indices, cells)
        return self._fetcher.fetch(self._requests(order, cells))

    def _requests(self, order: EpochOrder, cells: Iterator[Cell]) -> Iterator[Request]:
        seed_of, indices = seeds_of_batches("batch", self.seed, self._epoch), order.indices
        is_tensor = isinstance(indices, torch.Tensor)
        if is_tensor:
            indices = indices.numpy()  # far faster to slice
        for start, size in cells:
            rows = indices[start : start + (size or 1)]
            # A batch is seeded by the position of its first sample: its augmentations do not depend on earlier batches,
            # or on where a run was resumed.
            yield Request(rows.tolist() if is_tensor else rows, seed_of(start))

    def _plan(self, order: EpochOrder) -> TrainingPlan | BatchListPlan:
        ranks, steps = self.batches_of_round, self.accumulation
        if order.batch_sizes is not None:
            return BatchListPlan(order.batch_sizes, ranks, steps)
        assert self.batch_size is not None
        return TrainingPlan(len(order.indices), self.batch_size, ranks, steps, self.drop_last)

    def _rounds(self, order: EpochOrder) -> Iterator[Window]:
        size, ranks = len(order.indices), self.batches_of_round
        if order.batch_sizes is not None:
            return BatchListPlan(order.batch_sizes, ranks).windows()
        assert self.batch_size is not None
        return evaluation_rounds(size, batch_size=self.batch_size, ranks=ranks, drop_last=self.drop_last)
