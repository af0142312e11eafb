"""What ranks do together: many cases in one start of a group, each a script that also runs alone."""

from pathlib import Path

import pytest

from tests.chaos.size import some
from tests.support.processes import run_on_ranks

RANKS = Path(__file__).parents[1] / "ranks"
ON_ANY_NUMBER = ("accumulation", "streams", "determinism", "evaluation")
CASES = {
    1: ("items",),
    2: (*ON_ANY_NUMBER, "resuming", "callbacks", "two_ranks"),
    3: (*some((), ON_ANY_NUMBER), "resuming", "items", "gather", "evaluation_together", "predictions"),
    **dict(some((), ((4, ("resuming",)),))),
}


@pytest.mark.processes
@pytest.mark.parametrize("ranks", CASES)
def test_cases_that_need_nothing_but_their_ranks(ranks: int, tmp_path: Path) -> None:
    output = run_on_ranks(RANKS / "together.py", ranks, tmp_path, *CASES[ranks])
    for told in output.stdout_of_ranks:
        ends = [line for line in told.splitlines() if line.endswith(" is over")]
        assert ends == [f"{one} is over" for one in CASES[ranks]]
