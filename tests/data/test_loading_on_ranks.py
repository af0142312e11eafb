"""On several ranks, streams and samplers of all kinds give each sample once, and the weights of one process."""

from pathlib import Path

import pytest

from tests.support.processes import run_on_ranks

SCRIPT = Path(__file__).parents[1] / "ranks" / "streams.py"


@pytest.mark.processes
@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_share_streams_and_samplers_of_all_kinds(ranks: int) -> None:
    output = run_on_ranks(SCRIPT, ranks)
    assert [of_rank.splitlines()[-1] for of_rank in output.stdout_of_ranks] == ["done"] * ranks
