"""The order of the samples in an epoch, ours or that of a user's sampler. It is the same on every rank."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import operator
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import torch
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler

from pytorch_accelerated.data.sampling import epoch_order
from pytorch_accelerated.processes.ranks import Ranks
from pytorch_accelerated.seeding import mixed_seed, with_seed

_RANDOM_SAMPLER_OF_STATEFUL_LOADER = ("torchdata.stateful_dataloader.sampler", "RandomSampler")


@dataclasses.dataclass(frozen=True)
class EpochOrder:
    """The samples of one epoch.

    Attributes:
        indices: by position: a range for the order of the dataset, a tensor, or a list of other keys.
        batch_sizes: the sizes of a batch sampler's batches; None without one.
    """

    indices: Any
    batch_sizes: list[int] | None = None

    @property
    def size(self) -> int:
        """The number of samples."""
        return len(self.indices)


class EpochOrders:
    """The order of each epoch of the map-style dataset of `loader`, which has a sampler or batch sampler.

    Attributes:
        is_shuffled: whether we shuffle, without replacement.
        is_sequential: whether the samples come in the order of the dataset.
    """

    def __init__(self, loader: DataLoader[Any], ranks: Ranks, *, seed: int) -> None:
        self._dataset: Any = loader.dataset
        self._has_own_batches = loader.batch_size is None
        self._sampler: Any = loader.batch_sampler if self._has_own_batches else loader.sampler
        self._batch_sampler: Any = loader.batch_sampler
        self._ranks = ranks
        self._seed = seed
        self.is_shuffled = not self._has_own_batches and _is_plain_shuffle(self._sampler)
        self.is_sequential = not self._has_own_batches and type(self._sampler) is SequentialSampler
        self._sizes: EpochOrder | None = None
        self._read_ahead: tuple[int, EpochOrder] | None = None  # an epoch and its order

    def of(self, epoch: int) -> EpochOrder:
        """The order of an epoch. Must be called by all ranks."""
        if self.is_sequential:
            return EpochOrder(range(len(self._dataset)))
        if self.is_shuffled:
            return EpochOrder(epoch_order(len(self._dataset), seed=self._seed, epoch=epoch))
        ahead, self._read_ahead = self._read_ahead, None
        return ahead[1] if ahead is not None and ahead[0] == epoch else self._read_sampler(epoch)

    def sizes(self, epoch: int) -> EpochOrder:
        """An order with the sizes of every epoch, though not the indices of any; reads a sampler for `epoch`.

        Must be called by all ranks.
        """
        if self._sizes is None:
            if self.is_sequential or self.is_shuffled:
                self._sizes = EpochOrder(range(len(self._dataset)))
            else:
                order = self._read_sampler(epoch)
                # The sampler may count how often it is read, so this order is also used for the pass.
                self._read_ahead = epoch, order
                self._sizes = EpochOrder(range(order.size), order.batch_sizes)
        return self._sizes

    def _read_sampler(self, epoch: int) -> EpochOrder:
        """The order of a user's sampler or batch sampler."""
        parts = (self._sampler, getattr(self._sampler, "sampler", None))
        for part in parts:
            set_epoch = getattr(part, "set_epoch", None)
            if callable(set_epoch):
                set_epoch(epoch)
        if any(map(_is_distributed, parts)):
            rows = itertools.zip_longest(*self._ranks.exchange(self._drawn(self._batch_sampler, epoch)), fillvalue=[])
            batches = list(itertools.chain.from_iterable(rows))  # as `BatchListPlan` distributes them
        else:
            # Each rank could draw a different order.
            items = self._ranks.do_on_first(lambda: self._drawn(self._sampler, epoch))
            if not self._has_own_batches:
                return EpochOrder(_as_indices(items))
            batches = [batch for batch in items if len(batch)]
        indices = _as_indices(list(itertools.chain.from_iterable(batches)))
        return EpochOrder(indices, [len(batch) for batch in batches])

    def _drawn(self, sampler: Any, epoch: int) -> list[Any]:
        seed = mixed_seed("sampler", self._seed, epoch)
        with contextlib.ExitStack() as seeded:
            for generator in {id(own): own for own in _generators_of(sampler)}.values():
                seeded.callback(generator.set_state, generator.get_state())
                generator.manual_seed(seed)
            return with_seed(seed, list, sampler)


def drawn_seed(loader: Any) -> int | None:
    """A seed drawn from the user's generator of `loader` or its sampler; None without one."""
    if not isinstance(loader, DataLoader):
        return None
    generators = [*_generators_of(loader.batch_sampler), *_generators_of(loader.sampler)]
    if _is_of_stateful_loader(loader.sampler):
        generators.clear()  # this sampler makes its own generator, unless it gets the loader's
    generator = next(iter(generators), loader.generator)
    if generator is None:
        return None
    rewinds = _rewinds.get()
    if rewinds is not None:
        rewinds.callback(generator.set_state, generator.get_state())
    drawn = torch.empty((), dtype=torch.int64, device=generator.device).random_(generator=generator)
    return mixed_seed("generator", int(drawn))


@contextlib.contextmanager
def own_generators_kept() -> Iterator[None]:
    """Restore the states of generators from which `drawn_seed` draws within the block."""
    with contextlib.ExitStack() as rewinds:
        token = _rewinds.set(rewinds)
        rewinds.callback(_rewinds.reset, token)
        yield


_rewinds: ContextVar[contextlib.ExitStack | None] = ContextVar("_rewinds", default=None)


def _generators_of(sampler: Any) -> list[torch.Generator]:
    """The generators of a sampler and of the sampler within a batch sampler."""
    found = [getattr(part, "generator", None) for part in (sampler, getattr(sampler, "sampler", None))]
    return [generator for generator in found if isinstance(generator, torch.Generator)]


def _is_plain_shuffle(sampler: Any) -> bool:
    is_random = type(sampler) is RandomSampler or _is_of_stateful_loader(sampler)
    return is_random and not sampler.replacement and sampler._num_samples is None


def _is_of_stateful_loader(sampler: Any) -> bool:
    return (type(sampler).__module__, type(sampler).__name__) == _RANDOM_SAMPLER_OF_STATEFUL_LOADER


def _is_distributed(sampler: Any) -> bool:
    return hasattr(sampler, "num_replicas") and hasattr(sampler, "rank")


def _as_indices(indices: list[Any]) -> Any:
    """Integers of any type as a tensor, other keys unchanged."""
    try:
        return torch.tensor([operator.index(index) for index in indices], dtype=torch.int64)
    except TypeError:
        return indices
