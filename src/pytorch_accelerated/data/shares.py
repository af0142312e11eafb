"""What ranks tell each other about the next batches of their iterables, in as few messages as possible."""

from __future__ import annotations

import itertools
import operator
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from pytorch_accelerated.errors import DataError
from pytorch_accelerated.processes.ranks import Ranks
from pytorch_accelerated.trees import count_rows

# A message takes as long as a small update. It has room for a few more shares.
_SHARES_AHEAD = 64
_UNKNOWN = -1


class Share(NamedTuple):
    """What a rank has for an update or a round.

    Attributes:
        batches: their number.
        samples: in all of them; None if unknown.
    """

    batches: int
    samples: int | None


def total_of(everyones: Sequence[Share]) -> int | None:
    """The samples of all ranks; None if those of any rank are unknown."""
    known = [share.samples for share in everyones if share.samples is not None]
    return sum(known) if len(known) == len(everyones) else None


class Shares:
    """The shares of all ranks in the updates or rounds of one pass.

    Ranks exchange them once for each. If the batches are in memory already, as in a list, a message also announces full
    shares that come next, so that one message is enough for many. For that, batches are only looked at: none is read
    earlier than otherwise.

    Args:
        ranks: the processes.
        batches: the batches of a rank in a full share.
        batches_in_memory: returns another iterator over the batches of this pass, from the first one on; None if they
            are not in memory. Called after the first batch was read.
    """

    def __init__(self, ranks: Ranks, batches: int, batches_in_memory: Callable[[], Iterator[Any] | None]) -> None:
        self._ranks = ranks
        self._batches = batches
        self._batches_in_memory = batches_in_memory
        self._sizes: Iterator[int] | None = None  # of batches in memory
        self._sizes_behind = 0  # belong to batches that were read since
        self._announced: deque[int] = deque()  # samples of this rank in the next shares
        self._agreed: deque[list[Share]] = deque()

    def exchange(self, sizes: Sequence[int | None], batches_left: int) -> list[Share]:
        """The shares of all ranks, by rank. Must be called by all ranks.

        Args:
            sizes: of the batches in the share of this rank; None if unknown.
            batches_left: how many more batches it may use afterwards.

        Raises:
            DataError: if this share was announced, but is another one now.
        """
        samples = _UNKNOWN if None in sizes else sum(size or 0 for size in sizes)
        if self._ranks.count == 1:
            return [_share(len(sizes), samples)]
        if not self._announced:
            self._sizes_behind += len(sizes)
        elif (self._batches, self._announced.popleft()) != (len(sizes), samples):
            raise DataError(
                "A list of batches was changed while it was used: the other ranks were told the sizes of its next "
                f"batches, and one has another size now, or is missing (found: {list(sizes)}). Give each epoch a list "
                "of its own."
            )
        return self._agreed.popleft() if self._agreed else self._exchange(len(sizes), samples, batches_left)

    def _exchange(self, batches: int, samples: int, batches_left: int) -> list[Share]:
        if batches == self._batches:
            self._look_ahead(min(_SHARES_AHEAD, batches_left // batches))
        everyones = self._ranks.exchange_numbers([batches, samples, *self._announced])
        ahead = zip(*(announced for _, _, *announced in everyones), strict=False)  # as far as all ranks know
        self._agreed.extend([_share(self._batches, samples) for samples in by_rank] for by_rank in ahead)
        return [_share(batches, samples) for batches, samples, *_ in everyones]

    def _look_ahead(self, shares: int) -> None:
        """Announce up to `shares` full shares."""
        if self._sizes is None:
            self._sizes = _known_sizes(self._batches_in_memory() or iter(()))
        for _ in itertools.islice(self._sizes, self._sizes_behind):
            pass
        self._sizes_behind = 0
        while len(self._announced) < shares:
            sizes = list(itertools.islice(self._sizes, self._batches))
            if len(sizes) < self._batches:
                return
            self._announced.append(sum(sizes))


def _share(batches: int, samples: int) -> Share:
    return Share(batches, None if samples == _UNKNOWN else samples)


def _known_sizes(batches: Iterator[Any]) -> Iterator[int]:
    """The sizes of `batches` without empty ones, up to the first that is unknown.

    An iterator over a list that has reached its end doesn't notice what is appended later, so the end is not asked for.
    """
    while operator.length_hint(batches):
        size = count_rows(next(batches))
        if size is None:
            return
        if size:
            yield size
