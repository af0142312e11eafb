"""From sample indices to batches in host memory, in this process or in workers, always with the same randomness."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, default_collate

from pytorch_accelerated.data.arrays import ArrayDataset, as_array_dataset
from pytorch_accelerated.data.hub_streams import is_hub_stream
from pytorch_accelerated.data.sampling import Cell
from pytorch_accelerated.data.streams import KeyedStream, fetching_under, has_state, is_stateful_loader, knows_position
from pytorch_accelerated.data.workers import WorkerInit, begin_pass, end_pass, no_workers_left_on_error
from pytorch_accelerated.seeding import host_generators_seeded, mixed_seed

# What is read ahead at once of data in memory: little enough to stay in a processor's cache until it is used.
_BLOCK_BYTES = 512 * 1024
_BLOCK_BATCHES = 32


class Request(NamedTuple):
    """One batch to fetch.

    `key` seeds torch, numpy and random around fetching and collating it. It belongs to the batch, not to the worker
    or to what was fetched before, so augmentations are the same with any number of workers and after a resume.
    """

    indices: Any
    key: int


class BatchFetcher:
    """Fetches the batches of a map-style dataset.

    Args:
        loader: says how: dataset, collate function, workers. Its sampler is not used.
        seed: of the loader's own generator, so that nothing is drawn from torch's global one.
    """

    def __init__(self, loader: DataLoader[Any], *, seed: int) -> None:
        is_plain = loader.collate_fn is default_collate
        self._arrays: ArrayDataset | None = as_array_dataset(loader.dataset) if is_plain else None
        self._pins_memory = _pins_memory(loader)
        self._requests = _PendingRequests()
        self._loader: DataLoader[Any] | None = None
        self._pass: Iterator[Any] | None = None
        if self._arrays is None:
            dataset = _RequestDataset(loader.dataset, loader.collate_fn)
            self._loader = like_loader(loader, dataset, batch_size=None, sampler=self._requests, collate_fn=_unchanged)
            _seed_generator(self._loader, "workers", seed)

    @property
    def is_vectorised(self) -> bool:
        """Whether a batch is one indexing operation in this process."""
        return self._arrays is not None

    def fetch(self, requests: Iterable[Request]) -> Iterator[Any]:
        """The batches of `requests`, in order. One pass at a time."""
        assert self._loader is not None
        self._requests.pending = requests
        self._pass = begin_pass(self._loader)
        return self._pass

    def fetch_cells(self, order: torch.Tensor | None, cells: Iterator[Cell]) -> Iterator[Any]:
        """The batches of `cells`, for vectorised data: small ones several at a time, as each indexing has its price.

        Args:
            order: the rows by position, int64; None: as they come.
            cells: positions of the batches.
        """
        assert self._arrays is not None
        for first in cells:
            batches = max(1, min(_BLOCK_BYTES // max(1, first.size * self._arrays.row_bytes), _BLOCK_BATCHES))
            block = [first, *itertools.islice(cells, batches - 1)]
            sizes = [cell.size or 1 for cell in block]
            yield from self._arrays.fetch_many(_rows_of(block, sizes, order), sizes, pin_memory=self._pins_memory)

    def close(self) -> None:
        """End worker processes. The next pass starts new ones."""
        end_pass(self._loader, self._pass)
        self._pass = None


class StreamFetcher:
    """Fetches the batches of an iterable: a `DataLoader` over an `IterableDataset`, or whatever yields batches.

    With an `IterableDataset` in this process, every batch has a key of its own, as in `BatchFetcher`, and with a
    `StatefulDataLoader` in workers too. In other workers and for any other iterable without a state, randomness
    follows from the iterable itself.

    Args:
        loader: yields this rank's host batches.
        seed: mixed into the keys.
        rank: of this process.
        ranks: number of ranks.
        is_sharded: whether the dataset itself gives each rank samples of its own.
    """

    def __init__(self, loader: Iterable[Any], *, seed: int, rank: int, ranks: int, is_sharded: bool = False) -> None:
        self._seed = seed
        self._told_epochs = [loader, getattr(loader, "dataset", None), getattr(loader, "sampler", None)]
        self._source = loader
        self._loader: DataLoader[Any] | None = None
        self._stream: KeyedStream | None = None
        # A loader that nobody knows would hand on the dataset's state, exact or not.
        has_own_state = has_state(loader) and not is_hub_stream(getattr(loader, "dataset", None))
        self._stateful: Any = loader if has_own_state else None
        self._pass: Iterator[Any] | None = None
        self._resumed: Iterator[Any] | None = None
        self._epoch: int | None = None  # of the last pass, with the batches of it; None: there is nothing to say of it
        self._batches = 0
        self._is_finished = False
        is_known_kind = type(loader) is DataLoader or is_stateful_loader(loader)
        if is_known_kind and isinstance(loader, DataLoader) and isinstance(loader.dataset, IterableDataset):
            self._rebuild(loader, *((0, 1) if is_sharded else (rank, ranks)))

    @property
    def stateful(self) -> Any:
        """What says where the stream is: a dataset or a loader; None if nobody in this process can."""
        return self._stateful if self._stream is None or self._stateful is not self._stream else self._stream.dataset

    def fetch(self, epoch: int) -> Iterator[Any]:
        """The batches of one pass; after `load_state_dict`, of what is left of it if `epoch` is still the same."""
        resumed, self._resumed = self._resumed, None
        if resumed is None or epoch != self._epoch:
            if resumed is not None:
                self.close()
            self._epoch, self._batches, self._is_finished = epoch, 0, False
            resumed = self._begin(epoch)
        return resumed if self._stateful is None else self._counted(resumed)

    def goes_on_in(self, epoch: int) -> bool:
        """Whether the next pass over `epoch` begins behind what has been used already."""
        return self._resumed is not None and epoch == self._epoch

    def state_dict(self) -> dict[str, Any]:
        """Where the last pass is; `state` is None if nothing is known of it. All its batches must have been used."""
        # Workers, where nothing else is said, begin each pass with a new copy of the dataset.
        begins_anew = self._stateful is self._loader and self._is_finished
        is_known = self._stateful is self._stream or (self._epoch is not None and not begins_anew)
        return {
            "epoch": self._epoch,
            "batches": self._batches,
            "is_finished": self._is_finished,
            "state": self._stateful.state_dict() if is_known else None,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there. Workers are started now, so that what they make of it is known."""
        self.close()
        self._epoch, self._batches, self._is_finished = state["epoch"], state["batches"], state["is_finished"]
        self._resumed = None
        if state["state"] is not None:
            self._stateful.load_state_dict(state["state"])
        if self._epoch is not None:
            with no_workers_left_on_error(self._loader):
                self._resumed = iter(()) if self._is_finished else self._begin(self._epoch)

    def close(self) -> None:
        """End worker processes. The next pass starts new ones."""
        if self._loader is not None and self._stateful is self._loader:
            self._epoch = None
        end_pass(self._loader, self._pass)
        self._pass = None

    def _rebuild(self, loader: DataLoader[Any], rank: int, ranks: int) -> None:
        is_here = loader.num_workers == 0
        if is_stateful_loader(loader) or (is_here and knows_position(loader.dataset)):
            self._stream = KeyedStream(loader, seed=self._seed, rank=rank, ranks=ranks)
            self._loader = like_loader(loader, self._stream, batch_size=None, collate_fn=_unchanged)
            self._stateful = self._stream if is_here else self._loader
        else:
            self._stateful = None
            dataset: Any = loader.dataset
            if ranks > 1:
                dataset = _RankSlice(dataset, loader.batch_size or 1, rank, ranks)
            sizes: dict[str, Any] = {"batch_size": loader.batch_size, "drop_last": loader.drop_last}
            self._loader = like_loader(loader, dataset, collate_fn=loader.collate_fn, **sizes)

    def _begin(self, epoch: int) -> Iterator[Any]:
        """A new pass, or what is left of one, if what has a state was told so."""
        for part in self._told_epochs:
            set_epoch = getattr(part, "set_epoch", None)
            if callable(set_epoch):
                set_epoch(epoch)
        if self._loader is None:
            return self._keyed(self._source, epoch) if has_state(self._source) else iter(self._source)
        _seed_generator(self._loader, "stream workers", self._seed, epoch)
        if self._stream is not None:
            self._stream.epoch = epoch
        elif self._loader.num_workers == 0:
            return self._keyed(self._loader, epoch)
        self._pass = begin_pass(self._loader)
        return self._pass

    def _keyed(self, source: Iterable[Any], epoch: int) -> Iterator[Any]:
        """The batches of `source` from the current one on, each under its key. What begins a pass has a key too."""
        with host_generators_seeded(mixed_seed("stream", self._seed, epoch, "start")):
            batches = iter(source)
        return self._under_keys(batches, epoch)

    def _under_keys(self, batches: Iterator[Any], epoch: int) -> Iterator[Any]:
        for number in itertools.count(self._batches):
            with host_generators_seeded(mixed_seed("stream", self._seed, epoch, number)):
                try:
                    batch = next(batches)
                except StopIteration:
                    return
            yield batch

    def _counted(self, batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            self._batches += 1
            yield batch
        self._is_finished = True


def like_loader(loader: DataLoader[Any], dataset: Any, **settings: Any) -> DataLoader[Any]:
    """A `DataLoader` over `dataset` with the workers and pinning of `loader`, and a generator of its own.

    For the workers of a `KeyedStream`, it is a `StatefulDataLoader` if `loader` is one.
    """
    kind: type[DataLoader[Any]] = DataLoader
    worker_settings: dict[str, Any] = {}
    if loader.num_workers > 0:
        worker_settings = {
            "persistent_workers": loader.persistent_workers,
            "prefetch_factor": loader.prefetch_factor,
            "multiprocessing_context": loader.multiprocessing_context,
            "timeout": loader.timeout,
        }
        if is_stateful_loader(loader) and isinstance(dataset, KeyedStream):
            kind = type(loader)
            worker_settings["snapshot_every_n_steps"] = loader.snapshot_every_n_steps  # type: ignore[attr-defined]
    with warnings.catch_warnings():
        for said_by_loader_already in ("This DataLoader will create", "'set_vital' is deprecated"):
            warnings.filterwarnings("ignore", message=said_by_loader_already)
        workers = settings.pop("num_workers", loader.num_workers)
        common = {
            "num_workers": workers,
            "pin_memory": _pins_memory(loader),
            "worker_init_fn": (
                WorkerInit(loader.worker_init_fn, loader.dataset, workers, loader.multiprocessing_context)
                if workers
                else None
            ),
            "generator": torch.Generator(),
        }
        return kind(dataset, **{**common, **worker_settings, **settings})


def _rows_of(block: list[Cell], sizes: list[int], order: torch.Tensor | None) -> torch.Tensor | slice:
    """The rows of the cells of `block`, one cell after the other."""
    start, stop = block[0].start, block[-1].stop
    if stop - start == sum(sizes) and all(cell.stop == after.start for cell, after in itertools.pairwise(block)):
        return slice(start, stop) if order is None else order[start:stop]
    spans = [slice(cell.start, cell.start + size) for cell, size in zip(block, sizes, strict=True)]
    if order is None:
        return torch.cat([torch.arange(span.start, span.stop) for span in spans])
    return torch.cat([order[span] for span in spans])


def _pins_memory(loader: DataLoader[Any]) -> bool:
    """Whether to do what `loader` asks for: without an accelerator, torch only warns about it."""
    return loader.pin_memory and torch.accelerator.is_available()


def _seed_generator(loader: DataLoader[Any], *parts: object) -> None:
    """Seed what torch seeds the workers from."""
    assert loader.generator is not None
    loader.generator.manual_seed(mixed_seed(*parts))


class _PendingRequests(Sampler[Request]):
    """The requests of the pass that is about to start; a loader with persistent workers keeps its sampler for ever."""

    def __init__(self) -> None:
        self.pending: Iterable[Request] = ()

    def __iter__(self) -> Iterator[Request]:
        return iter(self.pending)


class _RequestDataset(Dataset[Any]):
    """Answers a `Request` with a collated batch, so that both happen under the batch's own key."""

    def __init__(self, dataset: Any, collate_fn: Callable[[list[Any]], Any]) -> None:
        self.dataset = dataset
        self.collate_fn = collate_fn
        self._may_read_columns = collate_fn is default_collate and _is_arrow_dataset_of_tensors(dataset)

    def __getitem__(self, request: Request) -> Any:
        with fetching_under(request.key):
            return self._fetch(request.indices)

    def _fetch(self, indices: Any) -> Any:
        if self._may_read_columns:
            columns = self.dataset[list(indices)]
            if all(isinstance(column, torch.Tensor) for column in columns.values()):
                return columns
            # Rows of other sizes, or no tensors: what to make of them the collate function knows.
            self._may_read_columns = False
        samples = self._samples(indices)
        try:
            return self.collate_fn(samples)
        except Exception as error:
            self._add_note(error, f"the batch of samples {list(indices)}")
            raise

    def _samples(self, indices: Any) -> list[Any]:
        fetch_many = getattr(self.dataset, "__getitems__", None)
        samples: list[Any] = []
        try:
            if fetch_many is not None:
                return fetch_many(list(indices))  # type: ignore[no-any-return]
            for index in indices:
                samples.append(self.dataset[index])  # noqa: PERF401  # their number tells which one has failed
        except Exception as error:
            failed = f"sample {indices[len(samples)]}" if fetch_many is None else f"one of the samples {list(indices)}"
            self._add_note(error, failed)
            raise
        return samples

    def _add_note(self, error: Exception, source: str) -> None:
        if hasattr(error, "add_note"):  # since Python 3.11
            error.add_note(f"Raised for {source} of the {type(self.dataset).__name__}.")


def _is_arrow_dataset_of_tensors(dataset: Any) -> bool:
    """Whether this is a Hugging Face dataset that yields tensors, so that it can make a batch of whole columns."""
    return type(dataset).__module__ == "datasets.arrow_dataset" and dataset.format["type"] == "torch"


class _RankSlice(IterableDataset[Any]):
    """This rank's samples of a stream that every rank reads: its neighbouring share of each global batch."""

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
