"""The order of the samples in an epoch, ours or a user's sampler's. It is the same on every rank."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import itertools
import operator
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from typing import Any

import torch
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler

from pytorch_accelerated.data.mixture import Mixture
from pytorch_accelerated.data.sampling import epoch_order
from pytorch_accelerated.errors import ConfigurationError
from pytorch_accelerated.facts.seeding import mixed_seed, with_seed
from pytorch_accelerated.ranks.ranks import Ranks

_RANDOM_SAMPLER_OF_STATEFUL_LOADER = ("torchdata.stateful_dataloader.sampler", "RandomSampler")
_MOST_SHOWN = 8  # rows


@dataclasses.dataclass(frozen=True)
class LeftOut:
    """Training data that a run passes over, as plain values for training states.

    Positions are those in an order that already lacks what the entries before this one leave out.

    Attributes:
        update: the update that is left out, or the first one without the rows.
        epoch: the epoch of the data, counted from 0.
        start: the first position in the order of that epoch.
        stop: the position after the last one; None to continue to the end, and through all later epochs.
        rows: the indices in the dataset that are left out there; None for every row.
        planned_for: the epoch of the data that schedules were made for, if the run was planned without the rows: one
            that leaves them out from its start. None for a resumed run, which keeps its schedules.
    """

    update: int
    epoch: int
    start: int
    stop: int | None
    rows: list[int] | None
    planned_for: int | None = None

    def __str__(self) -> str:
        if self.rows is None:
            return f"update {self.update}"
        more = f" and {len(self.rows) - _MOST_SHOWN} more" if len(self.rows) > _MOST_SHOWN else ""
        shown = ", ".join(map(str, self.rows[:_MOST_SHOWN]))
        return f"{'row' if len(self.rows) == 1 else 'rows'} {shown}{more} from update {self.update} on"


@dataclasses.dataclass(frozen=True)
class EpochOrder:
    """The samples of one epoch.

    Attributes:
        indices: by position: a range for the order of the dataset, a tensor, or a list of other keys.
        batch_sizes: the sizes of a batch sampler's batches; None without one.
    """

    indices: Any
    batch_sizes: list[int] | None = None

    def rows(self, start: int, stop: int) -> list[Any]:
        """What is at some positions."""
        rows = self.indices[start:stop]
        return rows.tolist() if isinstance(rows, torch.Tensor) else list(rows)

    def without(self, left_out: Iterable[LeftOut], epoch: int) -> EpochOrder:
        """The order of an epoch without what is left out of it. Batches get smaller, and empty ones vanish."""
        indices, sizes = self.indices, self.batch_sizes
        for each in left_out:
            if epoch < each.epoch or (epoch > each.epoch and each.stop is not None):
                continue
            there = slice(each.start if epoch == each.epoch else 0, each.stop)
            stays = torch.ones(len(indices), dtype=torch.bool)
            stays[there] = False
            if each.rows is not None:
                rows = indices[there].tolist() if isinstance(indices, torch.Tensor) else indices[there]
                gone = set(each.rows)
                stays[there] = torch.tensor([row not in gone for row in rows], dtype=torch.bool)
            if sizes is not None:
                sizes = [size for size in (int(part.sum()) for part in torch.split(stays, sizes)) if size]
            if isinstance(indices, torch.Tensor):
                indices = indices[stays]  # with many updates left out, this is done often
            else:
                indices = _as_indices(list(itertools.compress(indices, stays.tolist())))
        return EpochOrder(indices, sizes)


class EpochOrders:
    """The order of each epoch of the map-style dataset of `loader`, which has a sampler or batch sampler.

    Attributes:
        is_shuffled: whether we shuffle, without replacement.
        is_sequential: whether the samples come in the order of the dataset.
    """

    def __init__(self, loader: DataLoader[Any], ranks: Ranks, *, seed: int) -> None:
        self._dataset: Any = loader.dataset
        self._has_own_batches = loader.batch_size is None
        self._batch_sampler: Any = loader.batch_sampler
        sampler: Any = self._batch_sampler if self._has_own_batches else loader.sampler
        self._sampler = sampler
        self._ranks = ranks
        self._seed = seed
        is_random = type(sampler) is RandomSampler or _is_of_stateful_loader(sampler)
        self.is_shuffled = is_random and not sampler.replacement and sampler._num_samples is None
        self.is_sequential = type(sampler) is SequentialSampler
        self._is_ours = self.is_sequential or self.is_shuffled
        self._mixture = self._dataset if self.is_shuffled and isinstance(self._dataset, Mixture) else None
        self._left_out: tuple[LeftOut, ...] = ()
        self._latest: tuple[int, EpochOrder] | None = None  # an epoch and its order, which it takes time to find out
        self._is_ahead = False  # whether the pass of that order has not begun

    def of(self, epoch: int) -> EpochOrder:
        """The order of an epoch, for a pass. Must be called by all ranks."""
        if self._is_ours and not self._left_out:
            return self._whole(epoch)
        # The sampler may count how often it is read: once for each pass.
        if self._latest is None or not self._is_ahead or self._latest[0] != epoch:
            self._latest = epoch, self._whole(epoch).without(self._left_out, epoch)
        self._is_ahead = False
        return self._latest[1]

    def sizes(self, epoch: int, *, is_exact: bool = False) -> EpochOrder:
        """An order with the sizes of an epoch, not always with its indices. Must be called by all ranks.

        Args:
            epoch: of the data.
            is_exact: whether to read a sampler for that epoch; otherwise the last one that was read will do.
        """
        if self._is_ours and not self._left_out:
            return EpochOrder(range(len(self._dataset) if self._mixture is None else self._mixture.rows))
        if self._latest is None or ((self._is_ours or is_exact) and self._latest[0] != epoch):
            self._latest = epoch, self._whole(epoch).without(self._left_out, epoch)
            self._is_ahead = True
        return self._latest[1]

    def known(self, epoch: int) -> EpochOrder | None:
        """The order of an epoch; None if its sampler would have to be read. One rank may call it alone."""
        if self._latest is not None and self._latest[0] == epoch:
            return self._latest[1]
        return self.of(epoch) if self._is_ours else None

    def leave_out(self, left_out: Iterable[LeftOut]) -> None:
        """Leave this out from now on, and nothing else.

        Raises:
            ConfigurationError: if the sampler divides the rows over the ranks itself.
        """
        if any(map(_is_distributed, (self._sampler, getattr(self._sampler, "sampler", None)))):
            raise ConfigurationError(
                f"`leave_out` got rows or updates, but the {type(self._sampler).__name__} divides the rows over the "
                "ranks itself, into batches that would only get smaller. Pass the dataset without this sampler."
            )
        if self._left_out != (given := tuple(left_out)):
            self._left_out, self._latest = given, None

    def detached(self) -> EpochOrders:
        """A copy, with a copy of the sampler, that may be read without an effect on these orders or the sampler."""
        copied = copy.copy(self)
        copied._is_ahead = self._latest is not None
        if not self._is_ours:
            shared = (self._dataset, *_generators_of(self._sampler), *_generators_of(self._batch_sampler))
            samplers = self._sampler, self._batch_sampler
            copied._sampler, copied._batch_sampler = copy.deepcopy(samplers, {id(part): part for part in shared})
        return copied

    def _whole(self, epoch: int) -> EpochOrder:
        """The order of an epoch with everything."""
        if self.is_sequential:
            return EpochOrder(range(len(self._dataset)))
        if self._mixture is not None:
            return EpochOrder(self._mixture.order(seed=self._seed, epoch=epoch))
        if self.is_shuffled:
            return EpochOrder(epoch_order(len(self._dataset), seed=self._seed, epoch=epoch))
        return self._read_sampler(epoch)

    def _read_sampler(self, epoch: int) -> EpochOrder:
        """The order of a user's sampler or batch sampler."""
        parts = (self._sampler, getattr(self._sampler, "sampler", None))
        for part in parts:
            set_epoch = getattr(part, "set_epoch", None)
            if callable(set_epoch):
                set_epoch(epoch)
        if any(map(_is_distributed, parts)):
            # Such a sampler has a part of the rows on each rank; together they are one order again.
            rows = itertools.zip_longest(*self._ranks.exchange(self._drawn(self._batch_sampler, epoch)), fillvalue=[])
            batches = list(itertools.chain.from_iterable(rows))  # as `BatchListPlan` distributes them
        else:
            # The first rank draws for all, because each could draw a different order.
            items = self._ranks.do_on_first(lambda: self._drawn(self._sampler, epoch))
            if not self._has_own_batches:
                return EpochOrder(_as_indices(items))
            batches = [batch for batch in items if len(batch)]
        indices = _as_indices(list(itertools.chain.from_iterable(batches)))
        return EpochOrder(indices, [len(batch) for batch in batches])

    def _drawn(self, sampler: Any, epoch: int) -> list[Any]:
        seed = mixed_seed("sampler", self._seed, epoch)
        # Generators start from the seed of the epoch, so a resumed run draws the same order.
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
    if generators and _is_of_stateful_loader(loader.sampler):
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
