"""Two runs that save to one folder: the second is refused, and the first goes on as if nothing had been."""

import json
from pathlib import Path

import pytest

from tests.chaos.record import record
from tests.chaos.size import size
from tests.support.processes import TIME_LIMIT_SECONDS, run_forked

SCRIPT = Path(__file__).parent / "two_writers.py"


@pytest.mark.processes
def test_a_second_run_in_a_folder_is_refused_and_the_first_one_is_none_the_worse(tmp_path: Path):
    trials = size(2, 200)
    output = run_forked(SCRIPT, trials, tmp_path, timeout_seconds=size(TIME_LIMIT_SECONDS, 3600))
    done = json.loads(output.stdout.splitlines()[-1])
    assert done == {
        "second runs": trials,
        "refused": trials,
        "first runs that ended differently": 0,
        "damaged states": 0,
    }
    record("two runs in one folder", done)
