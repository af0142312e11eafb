"""Runs within Ray Train: the same numbers, restarts after a lost worker, reports, and shards of Ray Data."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.chaos.record import record
from tests.support.processes import REPOSITORY, run_script
from tests.support.reference import TOLERANCE, regression_data, tiny_trainer

pytest.importorskip("ray")
pytestmark = [pytest.mark.processes, pytest.mark.slow]
AFTER = [16, 20, 32, 40, 48, 60]  # the updates at which a run reports: each 16, and ends of epochs


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `ray_runs.py` has written."""
    folder = tmp_path_factory.mktemp("ray")
    run_script(REPOSITORY / "tests" / "ranks" / "ray_runs.py", folder, cwd=folder, timeout_seconds=1200)
    return folder


def result_of(folder: Path, run: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """What a run ended with, and what it reported."""
    return torch.load(folder / f"{run}.pt"), json.loads((folder / f"{run}.json").read_text())


def test_two_workers_train_like_one_process(folder: Path):
    result, reports = result_of(folder, "whole")
    trainer, rows = tiny_trainer(seed=3), regression_data(640)
    history = trainer.train(rows, 3, rows, per_device_batch_size=32)
    torch.testing.assert_close(result["model"], dict(trainer.model.state_dict()), rtol=0, atol=TOLERANCE)
    assert [each["update"] for each in reports] == AFTER
    at_ends = [each for each in reports if each["update"] in (20, 40, 60)]
    for name in ("train_loss_epoch", "eval_loss_epoch"):  # the table has ten digits
        assert [each[name] for each in at_ends] == pytest.approx(history.get_metric_values(name), abs=1e-9)


def test_a_run_that_lost_a_worker_ends_as_if_it_had_not(folder: Path):
    (whole, reports), (killed, reports_of_killed) = result_of(folder, "whole"), result_of(folder, "killed")
    torch.testing.assert_close(killed["model"], whole["model"], rtol=0, atol=0)
    assert (whole["is_resumed"], killed["is_resumed"]) == (False, True)
    assert reports_of_killed == reports
    record("SIGKILL of a worker of Ray", {"kills": len([*folder.glob("death_*")]), "runs that ended differently": 0})


def test_ray_keeps_the_best_states_and_none_without_a_value(folder: Path):
    reports = [each for each in result_of(folder, "whole")[1] if each["eval_loss_epoch"] is not None]
    best = sorted(reports, key=lambda each: each["eval_loss_epoch"])[:2]
    assert {each["update"] for each in best} == {20, 60}, "not the last two, so that it matters"
    _, kept = result_of(folder, "best")  # Ray's table has what it keeps
    assert {each["update"] for each in kept} == {20, 60}


def test_a_machine_that_will_be_taken_away_is_answered_by_a_state(folder: Path):
    (whole, _), (taken, reports) = result_of(folder, "whole"), result_of(folder, "taken")
    assert 7 <= reports[0]["update"] < 16
    assert [each["update"] for each in reports[1:]] == AFTER
    torch.testing.assert_close(taken["model"], whole["model"], rtol=0, atol=0)


def test_each_rank_trains_on_its_own_shard(folder: Path):
    result, _ = result_of(folder, "whole")
    shards = [sorted(rows[: len(rows) // 2]) for rows in result["rows"]]
    assert [len(shard) for shard in shards] == [320, 320]
    assert sorted(shards[0] + shards[1]) == list(range(640))
    assert result["losses"][1] < result["losses"][0]
