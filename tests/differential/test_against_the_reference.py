"""Scripts see the same with this library as with the reference package, but for the differences that are meant.

What they see with the reference was recorded by `make differential`, which is needed again after a scenario changes.
"""

import pytest

from tests.differential import both
from tests.differential.differences import WHERE, covers, explanation, findings, rows_of_the_page

pytestmark = [pytest.mark.slow, pytest.mark.processes]


def test_both_were_driven_on_one_process_and_on_two():
    for seen in both.observations():
        assert seen["gathering.world"]["ranks"] == 1
        for rank in range(both.WORLD_SIZE):
            world = seen[f"rank {rank} of {both.WORLD_SIZE}, gathering.world"]
            assert world == {"ranks": both.WORLD_SIZE, "gathered": [0, 1]}


def test_every_difference_is_meant():
    unexplained = [finding for finding in findings() if explanation(finding) is None]
    assert unexplained == [], "explain them in docs/coming_from/pytorch_accelerated.md, or mend them"


def test_every_difference_that_is_meant_is_seen():
    explained = [(finding, explanation(finding)) for finding in findings()]
    for row, patterns in WHERE.items():
        found = [finding for finding, reason in explained if reason == row]
        for pattern in patterns:
            assert any(covers([pattern], finding) for finding in found), (row, pattern)


def test_every_row_of_the_page_names_a_difference():
    assert rows_of_the_page() == list(WHERE)
