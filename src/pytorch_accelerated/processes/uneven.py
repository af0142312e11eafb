"""How the rows of a rank count while some ranks have none: in `gather`, and when ranks wait for each other.

A single process uses nothing in this module. `docs/design/rounds.md` has the reasons.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from pytorch_accelerated.processes.gathering import map_tensors, without_rows
from pytorch_accelerated.processes.ranks import Ranks


class UnevenRanks:
    """Tracks how the rows of this rank currently count.

    Args:
        ranks: the processes.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._has_empty_rank = False
        self._counts_nothing = False

    def gather(self, data: Any, padding_value: float | None) -> Any:
        """The rows of all ranks; see `Ranks.gather`."""
        if self._has_empty_rank:
            self._ranks.announce_gather(data, padding_value)
        elif self._counts_nothing:
            data = map_tensors(without_rows, data)
        return self._ranks.gather(data, padding_value)

    @contextlib.contextmanager
    def counting_nothing(self) -> Iterator[None]:
        """Context in which this rank's rows count nowhere: `gather` leaves them out."""
        self._counts_nothing = True
        try:
            yield
        finally:
            self._counts_nothing = False

    def take_part(self, work: Callable[[], Any], *, is_idle: bool) -> Any:
        """Do `work` while some ranks are idle; an idle rank answers the others' `gather` instead. All ranks call it.

        Returns:
            The result of `work`; None on an idle rank.
        """
        result = None
        self._has_empty_rank = True
        try:
            if not is_idle:
                result = work()
        finally:
            self._has_empty_rank = False
        self._ranks.finish_round(is_idle=is_idle)
        return result
