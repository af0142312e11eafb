"""Evaluation and prediction on any number of ranks equal those of one process, and no rank ever waits for ever."""

from pathlib import Path

import pytest

from tests.support.processes import run_forked, run_on_ranks

RANKS = Path(__file__).parents[1] / "ranks"


def test_one_process_gives_the_plain_sums_for_every_size(tmp_path: Path) -> None:
    assert run_forked(RANKS / "evaluation.py", tmp_path).stdout == "done\n"


@pytest.mark.processes
@pytest.mark.parametrize("ranks", [2, 3])
def test_several_ranks_give_the_plain_sums_for_every_size_and_gather_what_is_there(ranks: int, tmp_path: Path) -> None:
    output = run_on_ranks(RANKS / "evaluation.py", ranks, tmp_path)
    assert output.stdout_of_ranks == ("done\n",) * ranks


@pytest.mark.processes
def test_ranks_that_stop_or_gather_on_their_own_end_together_or_with_an_error() -> None:
    output = run_on_ranks(RANKS / "evaluation_together.py", 3)
    assert output.stdout_of_ranks == ("done\n",) * 3
