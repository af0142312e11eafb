"""What several machines need: one disk, a limit of waiting, and words when one of them is lost."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pytorch_accelerated import Trainer
from pytorch_accelerated.errors import ConfigurationError
from tests.support.processes import run_on_ranks

RANKS = Path(__file__).parent / "ranks"


@pytest.mark.processes
def test_machines_without_a_shared_disk_are_told_at_the_first_save_and_at_a_resume(tmp_path: Path) -> None:
    for told in run_on_ranks(RANKS / "shared_disk.py", 2, tmp_path).stdout_of_ranks:
        said = json.loads(told.splitlines()[-1])
        saved = said["saved to disks of their own"]
        assert saved.startswith("CheckpointError: The machines of this run see different training states")
        assert "machine 0" in saved
        assert "newest is epoch_1, with serial number 1; machine 1" in saved
        assert "no state" in saved
        assert "shared disk" in saved
        assert said["in the background"].startswith("CheckpointError: The machines of this run see different")
        for resumed in ("resumed from disks of their own", "resumed where the other machine is the first"):
            assert "shared disk" in said[resumed]
        assert "but not rank 1" in said["resumed on one rank"]
        assert said["afresh"] == "1 updates"
        assert said["resumed from a shared disk"] == "3 updates"


@pytest.mark.processes
def test_a_lost_rank_is_an_error_that_names_update_and_newest_state(tmp_path: Path) -> None:
    told = run_on_ranks(RANKS / "lost_peer.py", 2, "ends", tmp_path, 300).stdout_of_ranks[0]
    assert "callbacks hear of a LostPeerError" in told
    assert "Rank 0 of 2 lost another rank after update 3 (" in told
    assert f"The newest complete state is {tmp_path / 'states' / 'step_2'}, from which the run resumes" in told
    assert "caused by RuntimeError" in told


@pytest.mark.processes
@pytest.mark.slow
def test_a_rank_that_hangs_is_waited_for_as_long_as_the_timeout_says(tmp_path: Path) -> None:
    # Far below torch's half an hour, far above what a busy machine needs to begin.
    told = run_on_ranks(RANKS / "lost_peer.py", 2, "hangs", tmp_path, 20).stdout_of_ranks[0]
    assert "Rank 0 of 2 lost another rank after update 3 (" in told
    assert "20000ms" in told
    assert "step_2" in told


@pytest.mark.parametrize("timeout", [0, -1, float("nan"), float("inf"), "10", True])
def test_a_limit_of_waiting_is_a_positive_number_of_seconds(timeout: Any) -> None:
    with pytest.raises(ConfigurationError, match="`timeout` is"):
        Trainer(model := nn.Linear(1, 1), nn.MSELoss(), torch.optim.SGD(model.parameters()), timeout=timeout)
