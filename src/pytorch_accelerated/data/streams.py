"""Fetches batches of streams; some know their position: an `IterableDataset` or loader with a state.

Those of the package `datasets` have a state too, but it is exact for some of them only.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import operator
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, NamedTuple

from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from pytorch_accelerated.data.workers import (
    begin_pass,
    end_pass,
    like_loader,
    no_workers_left_on_error,
    pins_memory,
    seed_workers,
)
from pytorch_accelerated.errors import ConfigurationError
from pytorch_accelerated.facts.seeding import mixed_seed, seeds_of_batches, with_seed, without_second_numbers
from pytorch_accelerated.ranks.compat.extras import division_of_stream, parts_of_stream
from pytorch_accelerated.ranks.compat.torch import pinned

END: Final = object()
# A pass resumed from the state of these yields exactly the rest. After a shuffle buffer it does not, since the buffer
# starts empty; nor where rows are read ahead (batched functions, interleaving), which drew under an earlier key.
_EXACT_PARTS = frozenset(
    {
        "ArrowExamplesIterable",
        "ExamplesIterable",
        "FilteredExamplesIterable",
        "FormattedExamplesIterable",
        "MappedExamplesIterable",
        "RebatchedArrowExamplesIterable",
        "SelectColumnsIterable",
        "SkipExamplesIterable",
        "TakeExamplesIterable",
    }
)


_STATE = ("state_dict", "load_state_dict")
_DIVIDED_BY_RANK = ("litdata", "ray", "streaming")  # the last is MosaicML's; of Ray, shards of a dataset


def has_state(source: Any) -> bool:
    """Whether `source` can save its position and resume from it, asked without arguments."""
    if is_hub_stream(source) or not all(callable(getattr(source, name, None)) for name in _STATE):
        return False
    try:
        inspect.signature(source.state_dict).bind()  # litdata's dataset needs to be told what only its loader knows
    except TypeError:
        return False
    except ValueError:  # it is not written in Python
        pass
    return True


def divides_itself(source: Any, ranks: int) -> bool:
    """Whether a dataset or loader gives each of `ranks` ranks rows of its own, as streams of some libraries do.

    Raises:
        ConfigurationError: if a stream is divided for another number of ranks.
    """
    division = division_of_stream(source) if is_hub_stream(source) else None
    if division is not None and ranks not in (1, division[1]):
        raise ConfigurationError(
            f"`split_dataset_by_node` has divided the stream for {division[1]} processes, but there are {ranks}. Pass "
            "the stream as it was before: the trainer divides it."
        )
    return division is not None or any(
        kind.__module__.partition(".")[0] in _DIVIDED_BY_RANK for kind in type(source).__mro__
    )


def is_stateful_loader(loader: Any) -> bool:
    """Whether `loader` is torchdata's `StatefulDataLoader`, not a subclass."""
    kind = type(loader)
    return kind.__name__ == "StatefulDataLoader" and kind.__module__.startswith("torchdata.")


class Counted(NamedTuple):
    """A batch, and the number of samples that it was made of; None if nobody has counted them."""

    batch: Any
    samples: int | None = None


def counted(collate_fn: Callable[[Any], Any], samples: list[Any]) -> Counted:
    """The batch that `collate_fn` makes of these samples."""
    return Counted(collate_fn(samples), len(samples))


class KeyedStream(IterableDataset[Any]):
    """This rank's batches of a stream, each fetched and collated under its own key.

    The object always knows its position. In a worker, that includes the batches that the worker has read ahead. Each
    rank takes its part of every global batch. `seed` is mixed into the keys. `is_resumable` says whether a pass may
    resume from a state; other passes begin under a key of their own.

    Attributes:
        dataset: the user's.
        epoch: of the next pass; to be set before workers are started.
    """

    def __init__(
        self, loader: DataLoader[Any], collate_fn: Any, rank: int, ranks: int, *, seed: int, is_resumable: bool
    ) -> None:
        self.dataset: Any = loader.dataset
        self.epoch = 0
        self._collate_fn = collate_fn
        self._batch_size = loader.batch_size
        self._drop_last = loader.drop_last
        self._seed = seed
        self._place = rank, ranks
        self._is_resumable = is_resumable
        self._passes = 0
        self._is_resumed = False
        self._samples: Any = None
        self._rewind()

    def __iter__(self) -> Iterator[Any]:
        if not self._is_resumed:
            self._rewind()
        self._is_resumed = False
        worker = get_worker_info()
        # Persistent workers don't learn of later epochs.
        epoch = self.epoch + (0 if worker is None else self._passes)
        self._passes += 1
        key: tuple[object, ...] = ("stream", self._seed, epoch)
        if self._is_resumable:
            key = (*key, 0 if worker is None else worker.id)
            self._read_again(*key)
        else:
            self._samples = with_seed(mixed_seed(*key, "start"), self._begin)
        return self._batches(*key)

    def state_dict(self) -> dict[str, Any]:
        """The position in the current pass, and the states of the dataset and its iterator."""
        return {
            "batches": self._batches_read,
            "samples": self._samples_read,
            "is_exhausted": self._is_exhausted,
            "dataset": self.dataset.state_dict() if has_state(self.dataset) else None,
            "iterator": self._samples.state_dict() if has_state(self._samples) else None,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from `state` in the next pass, if it was taken within a pass."""
        self._rewind()
        if state["dataset"] is not None:
            self.dataset.load_state_dict(state["dataset"])
        self._is_resumed = state["samples"] > 0
        if not self._is_resumed:
            return
        batches, samples = map(operator.index, (state["batches"], state["samples"]))
        if state["dataset"] is None and state["iterator"] is None and not state["is_exhausted"]:
            self._batches_to_read_again = batches
            return
        self._batches_read, self._samples_read, self._is_exhausted = batches, samples, state["is_exhausted"]
        if self._is_exhausted:
            return  # at most an incomplete last batch is left
        self._samples = self._begin()
        if state["iterator"] is not None:
            self._samples.load_state_dict(state["iterator"])

    def _rewind(self) -> None:
        self._batches_read = self._samples_read = self._batches_to_read_again = 0
        self._is_exhausted = False
        self._samples = None

    def _begin(self) -> Any:
        return HubSamples(self.dataset) if is_exact_hub_stream(self.dataset) else iter(self.dataset)

    def _read_again(self, *key: object) -> None:
        """Read used samples again, under the same keys: samples may be random, or prepared before their batch."""
        seed_of = seeds_of_batches(*key)
        while self._batches_read < self._batches_to_read_again:
            if with_seed(seed_of(self._batches_read), self._next_samples) is END:
                return
            self._batches_read += 1

    def _batches(self, *key: object) -> Iterator[Any]:
        seed_of = seeds_of_batches(*key)
        while True:
            batch = with_seed(seed_of(self._batches_read), self._next_batch)
            if batch is END:
                self._rewind()
                return
            self._batches_read += 1
            yield batch

    def _next_batch(self) -> Any:
        samples = self._next_samples()
        return END if samples is END else self._collate_fn(samples)

    def _next_samples(self) -> Any:
        """The samples of this rank's next batch. Those before it, of other ranks, are read in vain."""
        if self._samples is None and not self._is_exhausted:
            self._samples = self._begin()
        size, batch = self._batch_size or 1, list[Any]()
        while len(batch) < size and not self._is_exhausted:
            # Batches of the whole run come one after the other in the stream, and ranks take turns.
            turn, used = divmod(self._samples_read, size)
            rank, ranks = self._place
            is_own = turn % ranks == rank
            wanted = size - max(used, len(batch) if is_own else 0)
            # Not `iter(self._samples)`: where a dataset is its own iterator, that begins a new pass.
            share = list(itertools.islice(map(next, itertools.repeat(self._samples)), wanted))
            self._samples_read += len(share)
            self._is_exhausted = len(share) < wanted
            if is_own:
                batch += share
        if not batch or (self._drop_last and len(batch) < size):
            return END
        return batch if self._batch_size else batch[0]


def is_hub_stream(source: Any) -> bool:
    """Whether `source` is a `datasets.IterableDataset`, whose own state is unreliable in general."""
    return any(map(_is_hub_class, type(source).__mro__))


def is_exact_hub_stream(source: Any) -> bool:
    """Whether `source` is a `datasets.IterableDataset` from whose state a pass resumes exactly.

    Unknown parts, such as subclasses and parts of other versions, count as inexact.
    """
    if not _is_hub_class(type(source)):
        return False
    for part in parts_of_stream(source):
        reads_ahead = getattr(part, "batched", False) or inspect.iscoroutinefunction(getattr(part, "function", None))
        if type(part).__name__ not in _EXACT_PARTS or reads_ahead:
            return False
    return True


class HubSamples(Iterator[Any]):
    """The samples of one pass over an exact stream of `datasets`, with a position.

    They are read from a separate stream with the same rows. The user's stream would return the position of its latest
    pass, which may be an evaluation, and a state once loaded would also apply to later runs.

    Args:
        dataset: must be an `is_exact_hub_stream`.
    """

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset.shard(num_shards=1, index=0)
        self._samples: Iterator[Any] | None = None
        self._start: dict[str, Any] | None = None

    def __next__(self) -> Any:
        if self._samples is None:
            self._samples = iter(self._dataset)
        return next(self._samples)

    def state_dict(self) -> dict[str, Any] | None:
        """The position of the pass; None if it has not started."""
        state: dict[str, Any] | None = self._start if self._samples is None else self._dataset.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Start after the sample at which `state` was taken."""
        self._start = state
        self._dataset.load_state_dict(state)


def _is_hub_class(kind: type) -> bool:
    return (kind.__module__, kind.__name__) == ("datasets.iterable_dataset", "IterableDataset")


class StreamFetcher:
    """Fetches the batches of an iterable: a `DataLoader` over an `IterableDataset`, or any iterable of batches.

    Every batch has its own key, as in `BatchFetcher`, if an `IterableDataset` is read in this process or in the workers
    of a `StatefulDataLoader`. In other workers, and for other iterables without a state, there are no keys.

    `seed` is mixed into the keys. A dataset that already gives each rank different samples is read as by one rank.

    A batch comes with the number of its samples, if they were collated here or in workers of ours.

    Attributes:
        stateful: the user's dataset or loader that knows the position in the stream; None if none in this process does.
    """

    def __init__(self, loader: Iterable[Any], rank: int, ranks: int, *, seed: int) -> None:
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
            self._rebuild(loader, rank, ranks)

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
        starts_over = self._keeper is self._loader and self._is_finished
        is_known = self._keeper is self._stream or (self._epoch is not None and not starts_over)
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
        self._pins_memory = is_here and pins_memory(loader)
        self._keeper, self.stateful, self._is_keyed = None, None, False
        dataset: Any = loader.dataset
        is_resumable = is_here and (has_state(dataset) or is_exact_hub_stream(dataset))
        is_resumable |= is_stateful_loader(loader)
        if is_here or is_resumable:
            stream = KeyedStream(loader, collate_fn, rank, ranks, seed=self._seed, is_resumable=is_resumable)
            self._source = self._stream = stream
            if not is_here:  # a loader of torchdata, which keeps the positions of its workers
                every = loader.snapshot_every_n_steps  # type: ignore[attr-defined]
                self._loader = like_loader(loader, self._stream, kind=type(loader), snapshot_every_n_steps=every)
            if is_resumable:
                self._keeper = self._stream if is_here else self._loader
                self.stateful = loader.dataset if is_here else self._loader
            return
        if ranks > 1:
            dataset = _RankSlice(dataset, loader.batch_size or 1, rank, ranks)
        settings: dict[str, Any] = {name: getattr(loader, name) for name in ("batch_size", "drop_last")}
        self._source = self._loader = like_loader(loader, dataset, collate_fn=collate_fn, **settings)

    def _begin(self, epoch: int) -> Iterator[Any]:
        """A new pass, or the rest of one if a state was loaded."""
        for part in self._told_epochs:
            set_epoch = getattr(part, "set_epoch", None)
            if callable(set_epoch):
                set_epoch(epoch)
        if self._stream is not None:
            self._stream.epoch = epoch
        if self._loader is not None:
            seed_workers(self._loader, "stream workers", self._seed, epoch)
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
