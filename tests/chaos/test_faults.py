"""Runs that are killed, interrupted or met by another run lose no state, and end as if nothing had been.

Scripts do this: each forks its runs from a process in which everything is imported, and prints what it did.
"""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.record import record
from tests.chaos.size import in_release, size, some
from tests.support.object_storage import BUCKET, object_storage
from tests.support.processes import TIME_LIMIT_SECONDS, run_forked, run_on_ranks

DYING = Path(__file__).parents[1] / "ranks" / "dying.py"
SEED = 20

pytestmark = pytest.mark.processes


def figures_of(script: str, *arguments: object) -> dict[str, Any]:
    path = Path(__file__).parent / script
    output = run_forked(path, *arguments, timeout_seconds=size(TIME_LIMIT_SECONDS, 7200))
    figures: dict[str, Any] = json.loads(output.stdout.splitlines()[-1])
    return figures


@pytest.mark.parametrize(
    "background", some((True,), (False, True)), ids=lambda is_so: "background" if is_so else "in between"
)
def test_killed_runs_lose_no_state_and_end_like_uninterrupted_ones(background: bool, tmp_path: Path):
    kills, storms, operations = size(2, 500), size(1, 25), size(1, 0)
    figures = figures_of("killing.py", kills, storms, operations, int(background), SEED, tmp_path)
    record(f"SIGKILL, {'in the background' if background else 'in between'}, seed {SEED}", figures)
    assert figures["runs killed once"] == kills
    assert figures["kills in storms"] > 0
    wanted = 2 * (operations or figures["operations of a save"])
    # In the background it is a matter of time when outdated states are deleted, and so how many operations there are.
    assert figures["deaths around an operation"] >= (wanted - 10 if background else wanted)


@in_release  # in tests/callbacks/test_beside.py a run dies
def test_a_run_and_what_evaluates_beside_it_are_killed_and_each_value_is_entered_once(tmp_path: Path):
    kills = 30
    figures = figures_of("beside.py", kills, SEED, tmp_path)
    record(f"SIGKILL, evaluation beside the run, seed {SEED}", figures)
    assert figures["kills of the run"] + figures["kills beside"] == kills


@in_release  # tests/training/test_signals.py sends them at chosen moments
@pytest.mark.skipif(os.name != "posix", reason="Windows has no such signals")
def test_runs_that_get_a_signal_at_any_moment_resume_to_the_same_end(tmp_path: Path):
    alone, on_ranks = size(3, 500), size(1, 100)
    found = figures_of("signalling.py", alone, on_ranks, SEED, tmp_path)
    for name, figures in found.items():
        record(f"signals to {name}, seed {SEED}", figures)
    assert [figures["signals that ended a run"] for figures in found.values()] == [alone, on_ranks]


def test_a_second_run_in_a_folder_is_refused_and_the_first_one_is_none_the_worse(tmp_path: Path):
    trials = size(1, 200)
    done = figures_of("two_writers.py", trials, tmp_path)
    nothing = {"first runs that ended differently": 0, "damaged states": 0}
    assert done == {"second runs": trials, "refused": trials, **nothing}
    record("two runs in one folder", done)


def test_runs_killed_while_they_upload_lose_no_state_that_was_there(tmp_path: Path):
    operations = size(1, 0)
    with object_storage():
        figures = figures_of("remote_killing.py", operations, SEED, tmp_path, f"s3://{BUCKET}")
    assert figures["kills"] == 2 * (operations or figures["operations"])
    record(f"SIGKILL around an operation of an upload, seed {SEED}", {**figures, "runs that ended differently": 0})


LOST_WORKER = r"DataLoader worker \(pid.* (is killed by signal|exited unexpectedly)"
DEATHS = {  # ranks, worker processes, and the complaint
    "killed": (1, 2, LOST_WORKER),
    "rank {} killed": (2, 0, "SIGKILL"),
    "crashed": (1, 2, LOST_WORKER),
}


# What a killed rank leaves is tested by tests/processes/test_several_machines.py, too.
@pytest.mark.parametrize("how", some(("killed",), tuple(DEATHS)))
def test_the_death_of_a_part_ends_the_run_with_an_error_from_which_it_can_resume(how: str, tmp_path: Path):
    ranks, workers, complaint = DEATHS[how]

    def end_of(folder: Path, how: str, item: int) -> str:
        return run_on_ranks(DYING, ranks, folder, how, item, workers).stdout_of_ranks[0].splitlines()[-1]

    whole = end_of(tmp_path / "whole", "never", 0)
    trials = size(1, 10)
    for number in range(trials):
        trial = tmp_path / str(number), how.format(number % 2), 3 + 2 * number
        with pytest.raises(AssertionError, match=complaint):
            end_of(*trial)
        assert end_of(*trial) == whole
    part = "rank killed" if ranks == 2 else f"loader process {how}"
    record(part, {"deaths": trials, "runs that ended differently": 0})
