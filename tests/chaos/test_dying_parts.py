"""When a loader process or a rank dies, the run ends with an error, and goes on as if nothing had been."""

from pathlib import Path

import pytest

from tests.chaos.record import record
from tests.chaos.size import IS_RELEASE, size
from tests.support.processes import run_forked, run_on_ranks

DYING = Path(__file__).parents[1] / "ranks" / "dying.py"


@pytest.mark.processes
@pytest.mark.parametrize("how", ["killed", "crashed"] if IS_RELEASE else ["killed"])
def test_the_death_of_a_loader_process_is_an_error_that_the_run_can_resume_from(how: str, tmp_path: Path):
    whole = run_forked(DYING, tmp_path / "whole", "never", 0, 2).stdout.splitlines()[-1]
    trials = size(1, 10)
    for number in range(trials):
        folder = tmp_path / str(number)
        with pytest.raises(
            AssertionError, match=r"DataLoader worker \(pid.* (is killed by signal|exited unexpectedly)"
        ):
            run_forked(DYING, folder, how, 3 + 2 * number, 2)
        assert run_forked(DYING, folder, how, 3 + 2 * number, 2).stdout.splitlines()[-1] == whole
    record(f"loader process {how}", {"deaths": trials, "runs that ended differently": 0})


@pytest.mark.processes
def test_the_death_of_a_rank_ends_all_of_them_and_the_run_can_resume(tmp_path: Path):
    whole = run_on_ranks(DYING, 2, tmp_path / "whole", "never", 0, 0).stdout_of_ranks[0].splitlines()[-1]
    trials = size(1, 15)
    for number in range(trials):
        folder, rank_and_item = tmp_path / str(number), 2 * number + 3
        with pytest.raises(AssertionError, match="SIGKILL"):
            run_on_ranks(DYING, 2, folder, f"rank {number % 2} killed", rank_and_item, 0)
        again = run_on_ranks(DYING, 2, folder, f"rank {number % 2} killed", rank_and_item, 0)
        assert again.stdout_of_ranks[0].splitlines()[-1] == whole
    record("rank killed", {"deaths": trials, "runs that ended differently": 0})
