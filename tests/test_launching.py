"""However a script is launched, its processes train together, or it is said that they do not."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes import Output, run_script, run_under_torchrun

SCRIPT = Path(__file__).parent / "ranks" / "launch.py"
ACCELERATE = Path(sys.executable).with_name("accelerate")


def facts_of(output: Output) -> list[dict[str, Any]]:
    """What each process has told, by rank."""
    lines = [line for line in output.stdout.splitlines() if line.startswith("{")]
    return sorted(map(json.loads, lines), key=lambda facts: facts["rank"])


def test_a_plain_start_is_one_process_without_a_word() -> None:
    (facts,) = facts_of(output := run_script(SCRIPT))
    assert facts["processes"] == 1
    assert not facts["is_distributed"]
    assert facts["is_first"] == [True, True]
    assert facts["decorated"] == facts["decorated_before"] == ["once", "once per node", "prepared"]
    assert facts["updates"] == 7
    assert facts["rows"] == 13
    assert facts["warnings"] == []
    assert output.stdout.count("printed") == 1


@pytest.mark.processes
def test_torchrun_without_a_gpu_trains_on_two_processes_together() -> None:
    first, second = facts_of(output := run_under_torchrun(SCRIPT, 2))
    assert [first["processes"], second["processes"]] == [2, 2]
    assert first["is_distributed"]
    assert [first["is_first"], second["is_first"]] == [[True, True], [False, False]]
    assert first["batch"] == 4
    assert first["updates"] == second["updates"] == 4
    assert first["rows"] + second["rows"] == 13
    assert first["weights"] == second["weights"]
    assert first["decorated"] == first["decorated_before"] == ["once", "once per node", "prepared"]
    assert second["decorated"] == second["decorated_before"] == [None, None, "prepared"]
    assert first["warnings"] == second["warnings"] == []
    assert output.stdout.count("printed") == 1


@pytest.mark.processes
def test_accelerate_launch_that_starts_one_process_instead_of_two_is_pointed_out() -> None:
    (facts,) = facts_of(run_script(ACCELERATE, "launch", "--cpu", "--num_processes", 2, SCRIPT))
    assert facts["processes"] == 1
    (warning,) = facts["warnings"]
    assert "`accelerate launch` was asked for 2 processes but started one" in warning
    assert "torch.distributed.run --nproc-per-node 2" in warning


ALONE_UNDER_A_LAUNCHER = """
from accelerate import Accelerator

Accelerator()  # on a machine without an accelerator this joins no group, whatever torchrun has asked for

import torch
from torch import nn
from pytorch_accelerated import Trainer
from pytorch_accelerated.errors import LaunchError

try:
    Trainer(model := nn.Linear(1, 1), None, torch.optim.SGD(model.parameters()))
except LaunchError as error:
    print(error)
"""


@pytest.mark.processes
def test_processes_that_would_train_side_by_side_are_an_error() -> None:
    output = run_under_torchrun(ALONE_UNDER_A_LAUNCHER, 2)
    for told in output.stdout_of_ranks:
        assert "The launcher started 2 processes" in told
        assert "accelerate made a group of 1" in told
        assert "ACCELERATE_USE_CPU=true" in told


NOTEBOOK = """
import torch
from torch import nn
from pytorch_accelerated import Trainer, notebook_launcher

def train(rows):
    trainer = Trainer(model := nn.Linear(1, 1), nn.MSELoss(), torch.optim.SGD(model.parameters()), callbacks=())
    trainer.train((torch.ones(rows, 1), torch.ones(rows, 1)), 1)
    # One write: the processes share a pipe, in which a line of several writes is torn apart.
    print(f"{trainer.run_config.num_processes} {trainer.run_state.updates}\\n", end="", flush=True)

notebook_launcher(train, (32,), num_processes=2)
"""


@pytest.mark.processes
def test_the_notebook_launcher_trains_on_two_processes_together() -> None:
    lines = run_script(NOTEBOOK).stdout.splitlines()
    assert [line for line in lines if line[0].isdigit()] == ["2 2", "2 2"]
