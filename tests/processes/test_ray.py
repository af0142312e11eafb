"""Runs within Ray Train: the same numbers, restarts after a lost worker, reports, and shards of Ray Data."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.digits import digits, digits_trainer
from tests.support.processes import REPOSITORY, run_script
from tests.support.reference import TOLERANCE

pytest.importorskip("ray")
pytestmark = [pytest.mark.processes, pytest.mark.slow]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that `ray_runs.py` has filled."""
    folder = tmp_path_factory.mktemp("ray")
    run_script(REPOSITORY / "tests" / "ranks" / "ray_runs.py", folder, cwd=folder)
    return folder


def reports_in(folder: Path, run: str) -> list[dict[str, Any]]:
    reports: list[dict[str, Any]] = json.loads((folder / f"{run}.json").read_text())
    return reports


def test_two_workers_train_like_one_process(results: Path):
    trainer = digits_trainer()
    trainer.train(digits(), 3, digits(), per_device_batch_size=32)
    whole = torch.load(results / "whole.pt")
    torch.testing.assert_close(whole["model"], dict(trainer.model.state_dict()), rtol=0, atol=TOLERANCE)
    reports = reports_in(results, "whole")
    assert [(each["epoch"], each["update"]) for each in reports] == [(1, 20), (2, 40), (3, 60)]
    assert [each["eval_loss_epoch"] for each in reports] == pytest.approx(whole["losses"], rel=1e-9)
    assert whole["losses"] == pytest.approx(trainer.run_history.get_metric_values("eval_loss_epoch"), rel=1e-12)


def test_a_run_that_lost_a_worker_ends_as_if_it_had_not(results: Path):
    whole, killed = torch.load(results / "whole.pt"), torch.load(results / "killed.pt")
    torch.testing.assert_close(killed["model"], whole["model"], rtol=0, atol=0)
    assert killed["losses"] == whole["losses"]
    updates = [each["update"] for each in reports_in(results, "killed")]
    assert updates == [5, 10, 15, 20, 20, *range(25, 41, 5), 40, *range(45, 61, 5), 60]


def test_a_machine_that_will_be_taken_away_is_answered_by_a_state_at_once(results: Path):
    within, *ends = reports_in(results, "taken")
    assert 7 <= within["update"] < 20
    assert within["eval_loss_epoch"] is None
    assert [each["update"] for each in ends] == [20, 40, 60]
    torch.testing.assert_close(
        torch.load(results / "taken.pt")["model"], torch.load(results / "whole.pt")["model"], rtol=0, atol=0
    )


def test_each_rank_trains_on_its_own_shard(results: Path):
    whole = torch.load(results / "whole.pt")
    halves = [sorted(rows[: len(rows) // 2]) for rows in whole["rows"]]
    assert sorted(sum(halves, [])) == list(range(640))
    assert all(len(half) == 320 for half in halves)
    first, second = whole["losses_of_shards"]
    assert second < 0.7 * first
