"""Ranks announce the batches that come next if these are in memory already."""

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from pytorch_accelerated.data.shares import Share, Shares, total_of
from pytorch_accelerated.errors import DataError
from pytorch_accelerated.processes.ranks import Ranks


class TwinRanks(Ranks):
    """Two ranks that say the same, as far as the other one knows."""

    def __init__(self, *, other_knows: int) -> None:
        self.count = 2
        self.messages: list[list[int]] = []
        self._other_knows = other_knows

    def exchange_numbers(self, numbers: Sequence[int]) -> list[list[int]]:
        self.messages.append(list(numbers))
        return [list(numbers), list(numbers[: 2 + self._other_knows])]


def batches_of(*sizes: int) -> list[Any]:
    return [(torch.zeros(size, 3), torch.zeros(size)) for size in sizes]


def in_memory(batches: list[Any]) -> Iterator[Any]:
    return iter(batches)


@pytest.mark.parametrize(("other_knows", "messages"), [(100, 3), (2, 3), (1, 4), (0, 6)])
def test_shares_are_announced_as_far_as_all_ranks_know_them(other_knows: int, messages: int) -> None:
    ranks = TwinRanks(other_knows=other_knows)
    batches = batches_of(4, 2, 0, 3, 4, 4, 1, 4, 4, 2, 2)
    sizes = [len(inputs) for inputs, _ in batches if len(inputs)]
    shares = Shares(ranks, 2, lambda: in_memory(batches))
    for first in range(0, len(sizes), 2):
        assert shares.exchange(sizes[first : first + 2], 100) == [Share(2, sum(sizes[first : first + 2]))] * 2
    assert shares.exchange([], 100) == [Share(0, 0)] * 2
    assert len(ranks.messages) == messages - (other_knows == 100)
    assert ranks.messages[-1] == [0, 0]


def test_no_share_is_announced_beyond_the_limit_of_a_pass() -> None:
    ranks = TwinRanks(other_knows=100)
    shares = Shares(ranks, 2, lambda: in_memory(batches_of(*[1] * 20)))
    shares.exchange([1, 1], 5)
    assert ranks.messages == [[2, 2, 2, 2]]


def test_a_message_holds_what_is_announced() -> None:
    ranks = TwinRanks(other_knows=100)
    Shares(ranks, 1, lambda: in_memory(batches_of(*[1] * 200))).exchange([1], 1000)
    assert len(ranks.messages[0]) == 66  # of 94, which `Ranks` can send at once


def test_unknown_sizes_are_not_announced() -> None:
    ranks = TwinRanks(other_knows=100)
    shares = Shares(ranks, 1, lambda: iter([*batches_of(1, 2), "opaque", *batches_of(3)]))
    everyones = [shares.exchange([size], 100) for size in (1, 2, None, 3)]
    assert everyones == [[Share(1, size)] * 2 for size in (1, 2, None, 3)]
    assert [total_of(each) for each in everyones] == [2, 4, None, 6]
    assert ranks.messages == [[1, 1, 2], [1, -1], [1, 3]]


@pytest.mark.parametrize("now", [[3], [], [2, 2]])
def test_a_changed_list_is_an_error(now: list[int]) -> None:
    shares = Shares(TwinRanks(other_knows=100), 1, lambda: in_memory(batches_of(1, 2)))
    shares.exchange([1], 100)
    with pytest.raises(DataError, match="A list of batches was changed while it was used"):
        shares.exchange(now, 100)
