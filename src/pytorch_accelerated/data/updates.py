"""The interface between loaders and the loop: the updates of a training pass, and the rounds of an evaluation."""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import torch
from torch.utils.data import DataLoader

from pytorch_accelerated.data.counting import Counter, has_ignored
from pytorch_accelerated.data.fingerprints import Fingerprint, fingerprint_of
from pytorch_accelerated.data.ordering import LeftOut
from pytorch_accelerated.data.sampling import Window
from pytorch_accelerated.errors import ConfigurationError, DataError
from pytorch_accelerated.facts.accumulation import Accumulation
from pytorch_accelerated.facts.trees import length_of
from pytorch_accelerated.ranks.ranks import Ranks

# Takes host batches and yields them on the trainer's device, in the same order.
DeviceFeed = Callable[[Iterator[Any]], Iterator[Any]]
# `weight` and `items` of each `MicroBatch` of an update.
ItemWeights = Sequence[tuple[float | None, int | None]]


class Update(NamedTuple):
    """What the batches of one optimizer update share: this object, which no other update has.

    Attributes:
        samples: over all ranks; the number of batches on a rank if the sizes of batches are unknown.
        items: of this rank and of all ranks, if `count_batch_items` determined the weights.
        window: its positions in the order of the epoch; None for a stream.
    """

    samples: int
    items: tuple[int, int] | None = None
    window: Window | None = None


class MicroBatch(NamedTuple):
    """A batch of this rank within an update; by default the only one, on a single rank.

    Attributes:
        batch: on the trainer's device.
        samples: in the batch; None if the loader does not know.
        weight: the factor of its mean loss that makes the update's gradient the mean over all items of the update on
            all ranks; None if the number of items is not known in advance.
        is_last: whether it completes the update.
        is_borrowed: whether it only keeps this rank in step with the others and does not count.
        has_empty_rank: whether the batch of some rank is borrowed; known to all ranks.
        items: the number of items in its mean loss, if `count_batch_items` determined the weight.
        update: the update that it belongs to.
    """

    batch: Any
    samples: int | None = None
    weight: float | None = 1.0
    is_last: bool = True
    is_borrowed: bool = False
    has_empty_rank: bool = False
    items: int | None = None
    update: Update = Update(0)


class Round(NamedTuple):
    """One batch per rank of an evaluation or prediction.

    Attributes:
        batch: this rank's, on the trainer's device; None if the rank has no samples in this round and borrows none.
        start: position of the batch's first sample in the order of the whole pass.
        samples: in the batch; None if the loader does not know.
        has_empty_rank: whether some rank has no samples; known to all ranks.
        is_idle: whether this rank has no samples.
        items: the number of items in the batch, if `count_batch_items` has counted them.
    """

    batch: Any
    start: int
    samples: int | None = None
    has_empty_rank: bool = False
    is_idle: bool = False
    items: int | None = None


# The attributes that scripts expect of a torch `DataLoader`, for batches that come from another object.
_WITHOUT_LOADER = {name: each.default for name, each in inspect.signature(DataLoader).parameters.items()}


@dataclasses.dataclass
class WaitingTime:
    """The seconds that a run has waited for batches."""

    seconds: float = 0.0


class RunLoader(ABC):
    """This rank's batches of the data that a user's loader describes.

    All other attributes come from the user's loader, or else are the defaults of torch's `DataLoader`.

    Args:
        source: the user's loader.
        ranks: the processes.
        seed: of everything random about the batches.
        accumulation: batches of a rank per update; an attribute too.
        feed: moves host batches to the trainer's device.

    Attributes:
        source: the user's loader.
        seed: of everything random about the batches.
        dataset: the user's, if there is one.
        batch_size: samples of a batch on this rank; None if they vary or are unknown.
        drop_last: whether samples that do not fill a batch are left out.
        waiting: the time that the run waited for batches.
        is_sharded: whether each rank has different data already.
        is_shuffled: whether we shuffle the samples of each epoch.
        is_vectorised: whether fetching a batch is one indexing operation in this process.
        collate_fn: makes a batch of samples; None if unknown.
        max_batches: of this rank, after which every pass ends.
        lanes: the batches of a round, whoever computes them; None: one per rank.
    """

    lanes: int | None = None
    is_sharded = False
    is_shuffled = False
    is_vectorised = False
    max_batches = sys.maxsize
    _fetcher: Any

    def __init__(
        self, source: Iterable[Any], ranks: Ranks, *, seed: int, accumulation: Accumulation, feed: DeviceFeed
    ) -> None:
        self.source = source
        self.dataset: Any = getattr(source, "dataset", None)
        self.batch_size: int | None = getattr(source, "batch_size", None)
        self.collate_fn: Any = getattr(source, "collate_fn", None)
        self.drop_last = bool(getattr(source, "drop_last", False))
        self.waiting = WaitingTime()  # an object, which limited copies of this loader share
        self.seed = seed
        self._ranks = ranks
        self.accumulation = accumulation
        self._feed = feed
        self._epoch = 0

    if not TYPE_CHECKING:  # otherwise type checkers would accept any misspelt attribute

        def __getattr__(self, name: str) -> Any:
            # The source's position is not the run's. An object without a source is still being constructed.
            if name.startswith("__") or name in ("source", "state_dict", "load_state_dict"):
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            if not isinstance(self.source, DataLoader) and name in _WITHOUT_LOADER:
                return getattr(self.source, name, _WITHOUT_LOADER[name])
            return getattr(self.source, name)

    @functools.cached_property
    def fingerprint(self) -> Fingerprint:
        """The fingerprint of rows that all ranks share. The first access fetches some of them."""
        return Fingerprint() if self.is_sharded else fingerprint_of(self.source)

    @functools.cached_property
    def has_ignored_targets(self) -> bool:
        """Whether the data in memory has targets of -100. The first access looks at all of them."""
        return has_ignored(self.dataset)

    @property
    def num_workers(self) -> int | None:
        """The number of processes that fetch now; None if unknown."""
        return getattr(self.source, "num_workers", None)

    @property
    def device(self) -> torch.device:
        """Where batches go."""
        return self._ranks.device

    @property
    def total_batch_size(self) -> int | None:
        """Samples of a batch over all ranks; None if they vary or are unknown."""
        size = self.batch_size
        if size is None:
            size = getattr(getattr(self.source, "batch_sampler", None), "batch_size", None)
        return size * self.batches_of_round if isinstance(size, int) else None

    @property
    def batches_of_round(self) -> int:
        """Batches that are computed side by side."""
        return self.lanes or self._ranks.count

    @property
    def mean_is_over(self) -> int:
        """By how much gradients are divided when they are joined: DDP takes their mean, lanes are added up."""
        return 1 if self.lanes else self._ranks.count

    @property
    def total_dataset_length(self) -> int | None:
        """Samples of the dataset; None if unknown."""
        return length_of(self.dataset)

    @property
    def num_samples(self) -> int | None:
        """Samples of one pass over all ranks, including those that `drop_last` leaves out; None if unknown."""
        return length_of(self.dataset)

    @property
    def num_batches(self) -> int | None:
        """Batches of this rank in one pass of training, evaluation or prediction; None if unknown."""
        return length_of(self)

    @property
    def num_updates(self) -> int | None:
        """Updates of one training pass; None if unknown."""
        return None if self.num_batches is None else self.accumulation.updates(self.num_batches)

    def count_updates(self) -> int | None:
        """Updates of a training pass in the current epoch; None if unknown. Must be called by all ranks."""
        return self.num_updates

    @abstractmethod
    def __len__(self) -> int:
        """Batches of this rank in one pass; a TypeError if unknown."""

    @abstractmethod
    def __iter__(self) -> Iterator[Any]:
        """The batches of one pass, without borrowed ones."""

    def indices(self, start: int, stop: int) -> list[int] | None:
        """The dataset's indices of the samples at these positions of the current epoch; None if unknown."""
        return None

    def leave_out(self, left_out: Iterable[LeftOut]) -> None:
        """Pass over these samples from now on, and over no others.

        Raises:
            ConfigurationError: if the rows of batches are unknown.
        """
        self._refuse_unknown_rows()

    def detached(self) -> RunLoader:
        """A copy whose epochs can be looked at without an effect on this loader or the user's sampler.

        Raises:
            ConfigurationError: if the rows of batches are unknown.
        """
        self._refuse_unknown_rows()

    def _refuse_unknown_rows(self) -> NoReturn:
        data = self.source if self.dataset is None else self.dataset
        raise ConfigurationError(
            f"The rows of updates are unknown: the {type(data).__name__} is read as it comes, and its rows have no "
            "numbers. Pass a dataset that has `__getitem__` and `__len__`."
        )

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next pass, counted from 0."""
        self._epoch = epoch

    def limited(self, max_batches: int) -> RunLoader:
        """This loader with passes of at most `max_batches` batches, also if its own limit is higher.

        The two share their worker processes and the position in a stream, so only one of them may be used at a time.
        """
        limited = copy.copy(self)
        limited.max_batches = min(max_batches, self.max_batches)
        return limited

    @abstractmethod
    def batches(
        self, *, start: int = 0, batches_done: int = 0, count_items: Counter | None = None
    ) -> Iterator[MicroBatch]:
        """The batches of a training pass, update by update.

        Args:
            start: samples of this epoch that were already used, over all ranks.
            batches_done: the batches of this rank that they came in; they count towards `max_batches`.
            count_items: counts the items of a host batch, where an item of the loss is not a sample; the update is
                then read ahead in host memory.
        """

    @abstractmethod
    def rounds(self, *, borrows: bool = False, count_items: Counter | None = None) -> Iterator[Round]:
        """The rounds of an evaluation or prediction pass: every sample once, or `max_batches` rounds.

        Args:
            borrows: give a rank without samples in a round the samples of another round.
            count_items: counts the items of a host batch, where an item of the loss is not a sample.
        """

    def close(self) -> None:
        """Stop worker processes, which otherwise wait for the next pass."""
        self._fetcher.close()

    def _weights_of_items(
        self, counts: Sequence[int | None], sizes: Sequence[int | None], *, are_tokens: bool
    ) -> tuple[ItemWeights, tuple[int, int] | None]:
        """The weights of this rank's batches in an update, from the number of items in each, and the update's tokens.

        If a count is unknown (None) on any rank, samples are used instead. Must be called by all ranks.

        Raises:
            DataError: if no rank has any item.
        """
        mine = [None in counts, None in sizes, *(sum(each or 0 for each in known) for known in (counts, sizes))]
        uncounted, unsized, items, samples = self._ranks.sum(mine)
        if uncounted and unsized:
            return [(None, None)] * len(counts), None
        numbers, total = (sizes, samples) if uncounted else (counts, items)  # one rule for all ranks
        if total == 0:
            raise DataError(
                "An update has no items at all, so its loss has no mean: `count_batch_items` returned 0 for each "
                "batch, or no target counts in the loss. Leave such batches out."
            )
        weights = [(self.mean_is_over * (number or 0) / total, None if uncounted else number) for number in numbers]
        return weights, (int(mine[2]), int(items)) if are_tokens and not uncounted else None


@dataclasses.dataclass
class Loaders:
    """The loaders of a run. Callbacks may replace them.

    Attributes:
        train: yields batches to train on; None if the run doesn't train.
        eval: yields batches to evaluate; None if there is nothing to evaluate. Of multiple evaluation sets, it belongs
            to the one that is being evaluated, or else to the first.
        train_kwargs: keyword arguments that `train` was made with, including defaults.
        eval_kwargs: the same for `eval`.
        eval_sets: multiple evaluation sets by name, in order; empty if there is only one, which has no name.
        further_eval: `eval` and `eval_kwargs` of the sets after the first, by name.
    """

    train: Any = None
    eval: Any = None
    train_kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    eval_kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    eval_sets: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    further_eval: dict[str, tuple[Any, Mapping[str, Any]]] = dataclasses.field(default_factory=dict)

    @property
    def eval_by_name(self) -> dict[str, Any]:
        """The loaders of several evaluation sets by name, between evaluations; empty if there is only one set."""
        return {name: self.further_eval[name][0] if name in self.further_eval else self.eval for name in self.eval_sets}

    @property
    def all_eval(self) -> list[Any]:
        """The loaders of all evaluation sets, in order. Assign others to change them."""
        return [] if self.eval is None else [self.eval, *(loader for loader, _ in self.further_eval.values())]

    @all_eval.setter
    def all_eval(self, loaders: list[Any]) -> None:
        self.eval, *further = loaders
        for (name, (_, kwargs)), loader in zip(list(self.further_eval.items()), further, strict=True):
            self.further_eval[name] = loader, kwargs
