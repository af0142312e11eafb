"""Fetches batches into host memory, in this process or in workers, with the same randomness in both cases."""

from __future__ import annotations

import functools
import itertools
import warnings
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, Sampler, default_collate

from pytorch_accelerated.data.rows import ArrayDataset, Request, RowBatches, as_array_dataset
from pytorch_accelerated.data.sampling import Cell
from pytorch_accelerated.data.streams import (
    END,
    Counted,
    KeyedStream,
    counted,
    has_state,
    is_hub_stream,
    is_stateful_loader,
    knows_position,
)
from pytorch_accelerated.data.workers import WorkerInit, begin_pass, end_pass, no_workers_left_on_error
from pytorch_accelerated.facts.seeding import mixed_seed, seeds_of_batches, with_seed, without_second_numbers
from pytorch_accelerated.ranks.compat.torch import pinned

_BATCHES_AT_ONCE = 16


class BatchFetcher:
    """Fetches the batches of a map-style dataset, with the collate function and the worker settings of `loader`.

    The sampler of `loader` is not used. Workers are seeded with `seed`, so nothing is drawn from torch's generator.

    Args:
        loader: the user's.
        seed: of the workers.
    """

    def __init__(self, loader: DataLoader[Any], *, seed: int) -> None:
        is_plain = loader.collate_fn is default_collate
        self._arrays: ArrayDataset | None = as_array_dataset(loader.dataset) if is_plain else None
        self._pins_memory = _pins_memory(loader)
        self._rows = RowBatches(loader.dataset, loader.collate_fn, pins_memory=self._pins_memory)
        self._requests = _PendingRequests()
        self._loader: DataLoader[Any] | None = None
        self._pass: Iterator[Any] | None = None
        if self._arrays is None and loader.num_workers > 0:
            settings: dict[str, Any] = {"batch_size": None, "sampler": self._requests, "collate_fn": _unchanged}
            self._loader = like_loader(loader, self._rows, **settings)
            _seed_generator(self._loader, "workers", seed)

    @property
    def is_vectorised(self) -> bool:
        """Whether a batch is one indexing operation in this process."""
        return self._arrays is not None

    def fetch(self, requests: Iterator[Request]) -> Iterator[Any]:
        """The batches of `requests`, in order. One pass at a time."""
        if self._loader is None:
            return map(self._rows.maker(), requests)
        self._requests.pending = requests
        self._pass = begin_pass(self._loader)
        return without_second_numbers(self._pass)

    def fetch_cells(self, order: Sequence[int] | torch.Tensor, cells: Iterator[Cell]) -> Iterator[Any]:
        """The batches of `cells`, for vectorised data. Several are fetched at a time, which takes a third less.

        `order` has the rows by position: an int64 tensor, or a range from 0.
        """
        assert self._arrays is not None
        while block := list(itertools.islice(cells, _BATCHES_AT_ONCE)):
            rows: list[Any] = [order[start : start + (size or 1)] for start, size in block]
            if isinstance(order, torch.Tensor):
                batches: Iterable[Any] = self._arrays.fetch_many(torch.cat(rows), [len(each) for each in rows])
            else:
                batches = [self._arrays.fetch(slice(each.start, each.stop)) for each in rows]
            yield from map(pinned, batches) if self._pins_memory else batches

    def close(self) -> None:
        """End worker processes. The next pass starts new ones."""
        end_pass(self._loader, self._pass)
        self._pass = None


class StreamFetcher:
    """Fetches the batches of an iterable: a `DataLoader` over an `IterableDataset`, or any iterable of batches.

    Every batch has its own key, as in `BatchFetcher`, if an `IterableDataset` is read in this process or in the workers
    of a `StatefulDataLoader`. In other workers, and for other iterables without a state, there are no keys.

    `seed` is mixed into the keys. `is_sharded` says that the dataset already gives each rank different samples.

    A batch comes with the number of its samples, if they were collated here or in workers of ours.

    Attributes:
        stateful: the user's dataset or loader that knows the position in the stream; None if none in this process does.
    """

    def __init__(self, loader: Iterable[Any], *, seed: int, rank: int, ranks: int, is_sharded: bool = False) -> None:
        self._seed = seed
        self._told_epochs = [loader, getattr(loader, "dataset", None), getattr(loader, "sampler", None)]
        self._source = loader
        self._is_keyed = has_state(loader)  # here, while a `KeyedStream` and workers have their own keys
        self._counts_samples = self._pins_memory = False
        self._loader: DataLoader[Any] | None = None
        self._stream: KeyedStream | None = None
        # An unknown loader would return the dataset's state even if that is inexact.
        has_own_state = has_state(loader) and not is_hub_stream(getattr(loader, "dataset", None))
        self._keeper: Any = loader if has_own_state else None  # has the position
        self.stateful: Any = self._keeper
        self._pass: Iterator[Any] | None = None
        self._resumed: Iterator[Any] | None = None
        self._epoch: int | None = None  # of the last pass; None: its position is unknown
        self._batches = 0
        self._is_finished = False
        is_known_kind = type(loader) is DataLoader or is_stateful_loader(loader)
        if is_known_kind and isinstance(loader, DataLoader) and isinstance(loader.dataset, IterableDataset):
            self._rebuild(loader, *((0, 1) if is_sharded else (rank, ranks)))

    def fetch(self, epoch: int) -> Iterator[Counted]:
        """The batches of one pass; after `load_state_dict` with the same epoch, the rest of that pass."""
        resumed, self._resumed = self._resumed, None
        if resumed is None or epoch != self._epoch:
            if resumed is not None:
                self.close()
            self._epoch, self._batches, self._is_finished = epoch, 0, False
            resumed = self._begin(epoch)
        batches = resumed if self._counts_samples else map(Counted, resumed)
        return batches if self._keeper is None else self._numbered(batches)

    def resumes_within(self, epoch: int) -> bool:
        """Whether the next pass over `epoch` starts after the batches that were already used."""
        return self._resumed is not None and epoch == self._epoch

    def state_dict(self) -> dict[str, Any]:
        """The position of the last pass; `state` is None if unknown. All fetched batches must have been used."""
        # Unless they are persistent, workers start each pass with a new copy of the dataset.
        begins_anew = self._keeper is self._loader and self._is_finished
        is_known = self._keeper is self._stream or (self._epoch is not None and not begins_anew)
        return {
            "epoch": self._epoch,
            "batches": self._batches,
            "is_finished": self._is_finished,
            "state": self._keeper.state_dict() if is_known else None,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from that position. Workers are started now, so that their errors are raised here."""
        self.close()
        self._epoch, self._batches, self._is_finished = state["epoch"], state["batches"], state["is_finished"]
        self._resumed = None
        if state["state"] is not None:
            self._keeper.load_state_dict(state["state"])
        if self._epoch is not None:
            with no_workers_left_on_error(self._loader):
                self._resumed = iter(()) if self._is_finished else self._begin(self._epoch)

    def close(self) -> None:
        """End worker processes. The next pass starts new ones."""
        if self._loader is not None and self._keeper is self._loader:
            self._epoch = None
        end_pass(self._loader, self._pass)
        self._pass = None

    def _rebuild(self, loader: DataLoader[Any], rank: int, ranks: int) -> None:
        is_here = loader.num_workers == 0
        self._counts_samples = loader.batch_size is not None
        collate_fn = functools.partial(counted, loader.collate_fn) if self._counts_samples else loader.collate_fn
        self._pins_memory = is_here and _pins_memory(loader)
        self._keeper, self.stateful, self._is_keyed = None, None, False
        is_resumable = is_stateful_loader(loader) or (is_here and knows_position(loader.dataset))
        if is_here or is_resumable:
            settings: dict[str, Any] = {"seed": self._seed, "rank": rank, "ranks": ranks, "is_resumable": is_resumable}
            self._source = self._stream = KeyedStream(loader, collate_fn, **settings)
            if not is_here:
                self._loader = like_loader(loader, self._stream, batch_size=None, collate_fn=_unchanged)
            if is_resumable:
                self._keeper = self._stream if is_here else self._loader
                self.stateful = loader.dataset if is_here else self._loader
            return
        dataset: Any = loader.dataset
        if ranks > 1:
            dataset = _RankSlice(dataset, loader.batch_size or 1, rank, ranks)
        sizes: dict[str, Any] = {"batch_size": loader.batch_size, "drop_last": loader.drop_last}
        self._source = self._loader = like_loader(loader, dataset, collate_fn=collate_fn, **sizes)

    def _begin(self, epoch: int) -> Iterator[Any]:
        """A new pass, or the rest of one if a state was loaded."""
        for part in self._told_epochs:
            set_epoch = getattr(part, "set_epoch", None)
            if callable(set_epoch):
                set_epoch(epoch)
        if self._stream is not None:
            self._stream.epoch = epoch
        if self._loader is not None:
            _seed_generator(self._loader, "stream workers", self._seed, epoch)
            self._pass = begin_pass(self._loader)
            return without_second_numbers(self._pass)
        if self._is_keyed:
            key = mixed_seed("stream", self._seed, epoch, "start")
            return self._under_keys(with_seed(key, iter, self._source), epoch)
        return map(pinned, self._source) if self._pins_memory else iter(self._source)

    def _under_keys(self, batches: Iterator[Any], epoch: int) -> Iterator[Any]:
        seeds = map(seeds_of_batches("stream", self._seed, epoch), itertools.count(self._batches))
        for seed in seeds:
            batch = with_seed(seed, next, batches, END)
            if batch is END:
                return
            yield batch

    def _numbered(self, batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            self._batches += 1
            yield batch
        self._is_finished = True


def like_loader(loader: DataLoader[Any], dataset: Any, **settings: Any) -> DataLoader[Any]:
    """A `DataLoader` over `dataset` with the worker settings and pinning of `loader`, and its own generator.

    For a `KeyedStream` with workers, it is a `StatefulDataLoader` if `loader` is one.
    """
    kind: type[DataLoader[Any]] = DataLoader
    worker_settings: dict[str, Any] = {}
    if loader.num_workers > 0:
        names = ("persistent_workers", "prefetch_factor", "multiprocessing_context", "timeout")
        worker_settings = {name: getattr(loader, name) for name in names}
        if is_stateful_loader(loader) and isinstance(dataset, KeyedStream):
            kind = type(loader)
            worker_settings["snapshot_every_n_steps"] = loader.snapshot_every_n_steps  # type: ignore[attr-defined]
    with warnings.catch_warnings():
        for known_from_loader in ("This DataLoader will create", "'set_vital' is deprecated"):
            warnings.filterwarnings("ignore", message=known_from_loader)
        workers = settings.pop("num_workers", loader.num_workers)
        common = {
            "num_workers": workers,
            "pin_memory": _pins_memory(loader),
            "worker_init_fn": (WorkerInit(loader.worker_init_fn, loader.dataset) if workers else None),
            "generator": torch.Generator(),
        }
        return kind(dataset, **{**common, **worker_settings, **settings})


def _pins_memory(loader: DataLoader[Any]) -> bool:
    """Whether `loader` asks for pinned memory and there is an accelerator; without one, torch would warn."""
    return loader.pin_memory and torch.accelerator.is_available()


def _seed_generator(loader: DataLoader[Any], *parts: object) -> None:
    """Seed the generator from which torch seeds the workers."""
    assert loader.generator is not None
    loader.generator.manual_seed(mixed_seed(*parts))


class _PendingRequests(Sampler[Request]):
    """The requests of the next pass. A loader with persistent workers always keeps the same sampler."""

    def __init__(self) -> None:
        self.pending: Iterable[Request] = ()

    def __iter__(self) -> Iterator[Request]:
        return iter(self.pending)


class _RankSlice(IterableDataset[Any]):
    """This rank's samples of a stream that every rank reads: a contiguous share of each global batch."""

    def __init__(self, dataset: IterableDataset[Any], batch_size: int, rank: int, ranks: int) -> None:
        self.dataset = dataset
        self.batch_size = batch_size
        self.rank = rank
        self.ranks = ranks

    def __iter__(self) -> Iterator[Any]:
        for position, sample in enumerate(self.dataset):
            if position // self.batch_size % self.ranks == self.rank:
                yield sample


def _unchanged(batch: Any) -> Any:
    return batch
