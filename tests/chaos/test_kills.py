"""Runs that are killed at any moment lose no state, and end as if nobody had killed them."""

import json
from pathlib import Path

import pytest

from tests.chaos.record import record
from tests.chaos.size import size
from tests.support.processes import TIME_LIMIT_SECONDS, run_forked

KILLING = Path(__file__).parent / "killing.py"
SEED = 20


@pytest.mark.processes
@pytest.mark.parametrize("background", [False, True], ids=["saved in between", "saved in the background"])
def test_killed_runs_lose_no_state_and_end_like_uninterrupted_ones(background: bool, tmp_path: Path):
    kills, storms, operations = size(2, 500), size(1, 25), size(1, 0)
    arguments = (kills, storms, operations, int(background), SEED, tmp_path)
    output = run_forked(KILLING, *arguments, timeout_seconds=size(TIME_LIMIT_SECONDS, 7200))
    figures = json.loads(output.stdout.splitlines()[-1])
    record(f"SIGKILL, {'in the background' if background else 'in between'}, seed {SEED}", figures)
    assert figures["runs killed once"] == kills
    assert figures["kills in storms"] > 0
    wanted = 2 * (operations or figures["operations of a save"])
    # In the background it is a matter of time when outdated states are deleted, and so how many operations there are.
    assert figures["deaths around an operation"] >= (wanted - 10 if background else wanted)
