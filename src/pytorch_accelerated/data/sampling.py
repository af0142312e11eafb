"""The distribution of samples to updates, batches and ranks, as pure functions of numbers.

All of it is arithmetic on positions. A position counts samples in the global order of an epoch, over all ranks, so it
keeps its meaning when a run resumes with another batch size or another number of ranks.
"""

from __future__ import annotations

import dataclasses
import itertools
import sys
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from pytorch_accelerated.facts.accumulation import Accumulation
from pytorch_accelerated.facts.seeding import mixed_seed


def epoch_order(size: int, *, seed: int, epoch: int) -> torch.Tensor:
    """The shuffled order of `size` samples in an epoch: an int64 tensor, the same on every rank."""
    generator = torch.Generator().manual_seed(mixed_seed("order", seed, epoch))
    return torch.randperm(size, generator=generator)


def deal(total: int, cells: int) -> list[int]:
    """`total` divided into `cells` as evenly as possible, larger shares first: ``deal(7, 3) == [3, 2, 2]``."""
    share, rest = divmod(total, cells)
    return [share + 1] * rest + [share] * (cells - rest)


class Cell(NamedTuple):
    """The samples of one batch on one rank: `size` positions of the epoch's order, from `start` on.

    If the cell is empty, its rank borrows the sample at `start`: it needs a forward and backward pass to stay in step
    with the other ranks, but the sample does not count.
    """

    start: int
    size: int


class Window(NamedTuple):
    """The samples of one update over all ranks: `size` positions from `start` on, in `rounds` of one cell per rank.

    With lanes, a rank has a round for each batch of each of its lanes, lane by lane; `turns` says whose batch it is, as
    the number of the lane among those of its rank.
    """

    start: int
    size: int
    rounds: tuple[tuple[Cell, ...], ...]
    turns: tuple[int, ...] = ()


def cut(start: int, total: int, *, rounds: int, ranks: int) -> tuple[tuple[Cell, ...], ...]:
    """`total` positions from `start` on as `rounds` of one cell per rank, in order, as evenly as possible."""
    cells = []
    position = start
    for size in deal(total, rounds * ranks):
        # Empty cells come last, where the position may be past the end: they borrow the window's first sample.
        cells.append(Cell(position if size else start, size))
        position += size
    return tuple(tuple(cells[first : first + ranks]) for first in range(0, len(cells), ranks))


def lanes_of(rank: int, *, lanes: int, ranks: int) -> range:
    """The lanes that a rank computes, one after the other."""
    ends = list(itertools.accumulate(deal(lanes, ranks), initial=0))
    return range(ends[rank], ends[rank + 1])


def laid_out(window: Window, *, ranks: int) -> Window:
    """A window with a cell for each lane in its rounds, with rounds of one cell per rank instead; see `Window`."""
    blocks = [lanes_of(rank, lanes=len(window.rounds[0]), ranks=ranks) for rank in range(ranks)]
    empty, rounds, turns = Cell(window.start, 0), [], []
    for turn in range(len(blocks[0])):
        for cells in window.rounds:
            own = tuple(cells[block[turn]] if turn < len(block) else empty for block in blocks)
            if any(cell.size for cell in own):
                rounds.append(own)
                turns.append(turn)
    return Window(window.start, window.size, tuple(rounds), tuple(turns))


@dataclasses.dataclass(frozen=True)
class TrainingPlan:
    """How an epoch of `size` samples is cut into updates.

    An update takes the next ``batch_size * ranks`` samples for each of its batches. The last one of the epoch takes the
    rest, in as few batches as possible, evenly. Every rank runs the same number of batches.

    Args:
        size: samples in the epoch, over all ranks.
        batch_size: samples of a batch on one rank.
        ranks: number of ranks.
        accumulation: batches of one rank per update.
        drop_last: omit the last samples if they do not fill a batch on every rank.
    """

    size: int
    batch_size: int
    ranks: int
    accumulation: Accumulation = Accumulation()
    drop_last: bool = False

    @property
    def num_batches(self) -> int:
        """Batches of one rank in the epoch."""
        per_round = self.batch_size * self.ranks
        return self.size // per_round if self.drop_last else -(-self.size // per_round)

    def windows(self, start: int = 0, max_batches: int = sys.maxsize) -> Iterator[Window]:
        """The updates of an epoch from position `start` on, at most `max_batches` batches on each rank."""
        per_round = self.batch_size * self.ranks
        end = min(self.size, self.num_batches * per_round, start + max_batches * per_round)
        for most in self.accumulation.sizes(start // per_round):
            size = min(most * per_round, end - start)
            if size <= 0:
                return
            rounds = -(-size // per_round)  # the last update has as few as its rest needs
            if rounds == self.ranks == 1:  # by far the most common case
                yield Window(start, size, ((Cell(start, size),),))
            else:
                yield Window(start, size, cut(start, size, rounds=rounds, ranks=self.ranks))
            start += size


def evaluation_rounds(size: int, *, batch_size: int, ranks: int, drop_last: bool = False) -> Iterator[Window]:
    """Rounds with each of `size` samples once, in order; the cells of a round are contiguous.

    All rounds but the last are full. If the last has fewer samples than ranks, it shares the samples of the previous
    round, so every rank has samples in every round if there are at least as many samples as ranks and the batch size is
    2 or more. Otherwise some cells are empty.
    """
    full = batch_size * ranks
    rest = size % full
    if drop_last:
        size, rest = size - rest, 0
    shared = full + rest if 0 < rest < ranks and size > full and batch_size > 1 else rest
    rounds = TrainingPlan(size - shared, batch_size, ranks).windows()
    if not shared:
        return rounds
    last = cut(size - shared, shared, rounds=-(-shared // full), ranks=ranks)
    return itertools.chain(
        rounds, (Window(cells[0].start, sum(cell.size for cell in cells), (cells,)) for cells in last)
    )


@dataclasses.dataclass(frozen=True)
class BatchListPlan:
    """How the batches of a user's batch sampler are distributed to the ranks: in turn.

    Positions count samples, as in `TrainingPlan`, so both are stored and restored in the same way.

    Args:
        sizes: samples in each batch, in order; 0 where a rank has none while another rank has some.
        ranks: number of ranks.
        accumulation: batches of one rank per update.
    """

    sizes: Sequence[int]
    ranks: int
    accumulation: Accumulation = Accumulation()

    @property
    def num_batches(self) -> int:
        return -(-len(self.sizes) // self.ranks)

    def windows(self, start: int = 0, max_batches: int = sys.maxsize) -> Iterator[Window]:
        """The updates from the first batch at or after position `start`, at most `max_batches` batches on each rank."""
        begins = list(itertools.accumulate(self.sizes, initial=0))
        first = next((index for index, begin in enumerate(begins) if begin >= start), len(self.sizes))
        # Empty batches belong to the round of batches before `start`.
        while first % self.ranks and first < len(self.sizes) and not self.sizes[first]:
            first += 1
        last = min(len(self.sizes), first + max(0, max_batches) * self.ranks)
        begin = first
        for most in self.accumulation.sizes(first // self.ranks):
            if begin >= last:
                return
            end = min(begin + most * self.ranks, last)
            borrowed = Cell(begins[begin], 0)
            cells = [Cell(begins[i], self.sizes[i]) if self.sizes[i] else borrowed for i in range(begin, end)]
            cells += [borrowed] * (-len(cells) % self.ranks)
            rounds = tuple(tuple(cells[i : i + self.ranks]) for i in range(0, len(cells), self.ranks))
            yield Window(begins[begin], begins[end] - begins[begin], rounds)
            begin = end
