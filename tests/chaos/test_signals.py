"""Runs that get a signal at any moment end in order, and go on to the same end as if they had not got it."""

import json
import os
from pathlib import Path

import pytest

from tests.chaos.record import record
from tests.chaos.size import size
from tests.support.processes import TIME_LIMIT_SECONDS, run_forked

SIGNALLING = Path(__file__).parent / "signalling.py"
SEED = 20

pytestmark = pytest.mark.skipif(os.name != "posix", reason="Windows has no such signals")


@pytest.mark.processes
def test_runs_that_get_a_signal_at_any_moment_resume_to_the_same_end(tmp_path: Path):
    alone, on_ranks = size(3, 500), size(1, 100)
    output = run_forked(SIGNALLING, alone, on_ranks, SEED, tmp_path, timeout_seconds=size(TIME_LIMIT_SECONDS, 7200))
    found = json.loads(output.stdout.splitlines()[-1])
    for name, figures in found.items():
        record(f"signals to {name}, seed {SEED}", figures)
    assert [figures["signals that ended a run"] for figures in found.values()] == [alone, on_ranks]
