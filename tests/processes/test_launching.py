"""However a script is launched, its processes train together, or it is said that they do not."""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pytorch_accelerated.errors import LaunchError
from pytorch_accelerated.processes import launching
from pytorch_accelerated.processes.worlds import find_world, first_host
from tests.support.processes import Output, run_forked, run_on_ranks, run_script, run_under_torchrun

SCRIPT = Path(__file__).parents[1] / "ranks" / "launch.py"
ACCELERATE = Path(sys.executable).with_name("accelerate")


def facts_of(output: Output) -> list[dict[str, Any]]:
    """What each process has told, by rank."""
    lines = [line for line in output.stdout.splitlines() if line.startswith("{")]
    return sorted(map(json.loads, lines), key=lambda facts: facts["rank"])


def test_a_plain_start_is_one_process_without_a_warning() -> None:
    (facts,) = facts_of(output := run_forked(SCRIPT))
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


def slurm(rank: int, size: int = 2) -> dict[str, str]:
    """What `srun` sets for a task on one machine."""
    return {
        "SLURM_JOB_ID": str(os.getpid()),  # the port is made of it
        "SLURM_NNODES": "1",
        "SLURM_NTASKS": str(size),
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank),
        "SLURM_NODEID": "0",
        "SLURM_JOB_NODELIST": "node[17-18]",
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NODELIST": "node17",
        "SLURM_STEP_NUM_NODES": "1",
        "SLURM_STEP_NUM_TASKS": str(size),
        "SLURM_STEP_TASKS_PER_NODE": str(size),
    }


def open_mpi(rank: int, size: int = 2) -> dict[str, str]:
    """What Open MPI's `mpirun` sets on one machine."""
    return {
        "OMPI_COMM_WORLD_SIZE": str(size),
        "OMPI_COMM_WORLD_RANK": str(rank),
        "OMPI_COMM_WORLD_LOCAL_SIZE": str(size),
        "OMPI_COMM_WORLD_LOCAL_RANK": str(rank),
        "PMIX_NAMESPACE": str(os.getpid()),
    }


def hydra(rank: int, size: int = 2) -> dict[str, str]:
    """What the `mpirun` of Intel MPI and of MPICH sets on one machine."""
    return {
        "PMI_SIZE": str(size),
        "PMI_RANK": str(rank),
        "MPI_LOCALNRANKS": str(size),
        "MPI_LOCALRANKID": str(rank),
        "PMI_JOBID": str(os.getpid()),
    }


@pytest.mark.processes
@pytest.mark.parametrize("launcher", [slurm, open_mpi, hydra])
def test_the_processes_of_srun_and_of_mpirun_train_together(launcher: Callable[[int], dict[str, str]]) -> None:
    first, second = facts_of(run_on_ranks(SCRIPT, 2, launcher=[launcher(rank) for rank in range(2)]))
    assert [first["processes"], second["processes"]] == [2, 2]
    assert [first["is_first"], second["is_first"]] == [[True, True], [False, False]]
    assert first["rows"] + second["rows"] == 13
    assert first["weights"] == second["weights"]
    assert second["decorated_before"] == [None, None, "prepared"]


@pytest.mark.parametrize(
    "variables",
    [
        {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "4"},  # a shell of `salloc`
        {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "ENVIRONMENT": "BATCH"},
    ],
    ids=["salloc", "sbatch"],
)
def test_a_process_that_srun_has_not_started_trains_alone_and_says_so(variables: dict[str, str]) -> None:
    (facts,) = facts_of(run_on_ranks(SCRIPT, 1, launcher=[variables]))
    assert facts["processes"] == 1
    assert facts["updates"] == 7
    (warning,) = facts["warnings"]
    assert "Slurm has allocated 4 tasks" in warning
    assert "srun python train.py" in warning


@pytest.mark.parametrize(
    ("nodes", "host"),
    [
        ("gpu1", "gpu1"),
        ("gpu1,gpu2", "gpu1"),
        ("gpu[007-012,020],login1", "gpu007"),
        ("gpu[3,5-7]", "gpu3"),
        ("rack[1-2]node[04-08]", "rack1node04"),
        ("a-b-[2-3].cluster.org", "a-b-2.cluster.org"),
    ],
)
def test_the_first_host_of_a_list_of_nodes(nodes: str, host: str) -> None:
    assert first_host(nodes) == host


SEVERAL_NODES = {
    **slurm(5, size=7),
    "SLURM_STEP_NODELIST": "gpu[017,030-031]",
    "SLURM_STEP_NUM_NODES": "3",
    "SLURM_STEP_TASKS_PER_NODE": "3,2(x2)",
    "SLURM_NODEID": "2",
    "SLURM_LOCALID": "0",
}


def test_the_place_of_a_task_on_several_nodes_of_slurm() -> None:
    world = find_world(SEVERAL_NODES)
    assert world is not None
    assert (world.size, world.rank, world.local_rank, world.local_size) == (7, 5, 0, 2)
    assert world.address == "gpu017"
    other_rank = find_world({**SEVERAL_NODES, "SLURM_PROCID": "0", "SLURM_NODEID": "0"})
    other_step = find_world({**SEVERAL_NODES, "SLURM_STEP_ID": "1"})
    assert other_rank is not None
    assert other_step is not None
    assert other_rank.port == world.port
    assert other_step.port != world.port
    chosen = find_world({**SEVERAL_NODES, "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "1234"})
    assert chosen is not None
    assert (chosen.address, chosen.port) == ("10.0.0.1", 1234)


def test_the_variables_of_torchrun_win_over_those_of_what_started_it() -> None:
    torchrun = {"WORLD_SIZE": "8", "RANK": "3", "LOCAL_RANK": "3", "MASTER_ADDR": "gpu1", "MASTER_PORT": "29400"}
    torchrun |= {"LOCAL_WORLD_SIZE": "4", "GROUP_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "x"}
    world = find_world({**slurm(1), **torchrun})
    assert world is not None
    assert (world.size, world.rank, world.port) == (8, 3, 29400)
    assert find_world({**slurm(1), "WORLD_SIZE": "1", "RANK": "0"}) is None  # said so on purpose


def test_a_script_may_export_a_part_of_the_variables_before_srun() -> None:
    world = find_world({**SEVERAL_NODES, "WORLD_SIZE": "7", "MASTER_ADDR": "gpu017", "MASTER_PORT": "1234"})
    assert world is not None
    assert (world.size, world.rank, world.local_rank, world.address, world.port) == (7, 5, 0, "gpu017", 1234)


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"WORLD_SIZE": "2"}, "no RANK and no LOCAL_RANK"),
        ({"RANK": "1"}, "RANK=1 and WORLD_SIZE=None"),
        ({"WORLD_SIZE": "2", "RANK": "1"}, "has no LOCAL_RANK"),
        ({"WORLD_SIZE": "2", "RANK": "2", "LOCAL_RANK": "0"}, "ranks go from 0 to 1"),
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE='two'"),
        ({**slurm(0), "WORLD_SIZE": "4"}, "srun started 2"),
        ({**open_mpi(0), "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}, "mpirun -x MASTER_ADDR=HOST"),
        (
            {**slurm(0), "WORLD_SIZE": "1", "RANK": "0", "GROUP_WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "x"},
            "srun started 2 copies of torchrun",
        ),
    ],
)
def test_a_world_in_which_a_process_cannot_find_its_place_is_an_error(variables: dict[str, str], words: str) -> None:
    with pytest.raises(LaunchError, match=words):
        find_world(variables)


CONFIG = """
compute_environment: LOCAL_MACHINE
distributed_type: MULTI_CPU
num_machines: 1
num_processes: 2
use_cpu: true
mixed_precision: "no"
"""


@pytest.mark.processes
def test_accelerate_launch_that_starts_one_process_instead_of_two_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(CONFIG)
    with pytest.raises(AssertionError, match="LaunchError: `accelerate launch` was asked for 2 processes") as failure:
        run_script(ACCELERATE, "launch", "--config_file", "config.yaml", SCRIPT, "--rate", "0.1", cwd=tmp_path)
    assert f"torchrun --nproc-per-node 2 {SCRIPT} --rate 0.1" in str(failure.value)
    assert f"by {tmp_path / 'config.yaml'}" in str(failure.value)


@pytest.mark.parametrize(
    ("options", "processes", "source"),
    [
        ("--cpu --num_processes 2", 2, "its command line"),
        ("--config_file config.yaml", 2, "{}/config.yaml"),
        ("--config_file config.yaml --num_processes 1", 1, "its command line"),
    ],
)
def test_the_settings_of_accelerate_launch_are_read_from_its_command(
    options: str, processes: int, source: str, tmp_path: Path
) -> None:
    (tmp_path / "config.yaml").write_text(CONFIG)
    asked = launching._settings_of([*options.split(), "train.py", "--rate", "0.1"], folder=tmp_path)
    assert asked is not None
    assert (asked.processes, asked.source) == (processes, source.format(tmp_path))
    assert asked.command == f"torchrun --nproc-per-node {processes} train.py --rate 0.1"


ALONE_UNDER_A_LAUNCHER = """
from accelerate import Accelerator

alone = Accelerator()  # on a machine without an accelerator this joins no group, whatever torchrun has asked for

import torch
from torch import nn
from pytorch_accelerated import Trainer
from pytorch_accelerated.errors import LaunchError

for accelerator in (None, alone, lambda: alone):
    try:
        Trainer(model := nn.Linear(1, 1), None, torch.optim.SGD(model.parameters()), accelerator=accelerator)
    except LaunchError as error:
        print(error)
"""


@pytest.mark.processes
def test_processes_that_would_train_side_by_side_are_an_error() -> None:
    output = run_on_ranks(ALONE_UNDER_A_LAUNCHER, 2)
    for told in output.stdout_of_ranks:
        assert told.count("2 processes were started") == 3
        assert told.count("accelerate created a group of 1") == 3
        assert told.count("ACCELERATE_USE_CPU=true") == 3


NOBODY_COMES = """
import torch
from torch import nn
from pytorch_accelerated import Trainer

Trainer(model := nn.Linear(1, 1), nn.MSELoss(), torch.optim.SGD(model.parameters()), timeout=2)
"""


@pytest.mark.processes
@pytest.mark.parametrize("restarts", ["0", "1"])
def test_a_rank_that_finds_no_others_says_where_it_waited(restarts: str) -> None:
    variables = {**open_mpi(0), "TORCHELASTIC_RESTART_COUNT": restarts}
    with pytest.raises(
        AssertionError, match=r"LaunchError: Rank 0 of 2 could not meet the others at 127\.0"
    ) as failure:
        run_on_ranks(NOBODY_COMES, 1, launcher=[variables])
    assert ("TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in str(failure.value)) == (restarts == "1")


GIVEN_BY_FUNCTION = """
from accelerate import Accelerator
import torch
from torch import nn
from pytorch_accelerated import Trainer

model = nn.Linear(1, 1)
trainer = Trainer(model, nn.MSELoss(), torch.optim.SGD(model.parameters()), accelerator=lambda: Accelerator())
trainer.train((torch.ones(8, 1), torch.ones(8, 1)), 1)
print(trainer.run_config.num_processes)
"""


@pytest.mark.processes
@pytest.mark.parametrize("launcher", [None, slurm])
def test_an_accelerator_that_a_function_makes_joins_the_others(
    launcher: Callable[[int], dict[str, str]] | None,
) -> None:
    variables = None if launcher is None else [launcher(rank) for rank in range(2)]
    assert run_on_ranks(GIVEN_BY_FUNCTION, 2, launcher=variables).stdout_of_ranks[0].endswith("2\n")


GROUP_WITHOUT_VARIABLES = """
import os
import torch.distributed as dist

place = {name.lower(): int(os.environ.pop(name)) for name in ("RANK", "WORLD_SIZE")}
os.environ.pop("LOCAL_RANK")
dist.init_process_group("gloo", **place)

import torch
from torch import nn
from pytorch_accelerated import Trainer
from pytorch_accelerated.errors import LaunchError

try:
    Trainer(model := nn.Linear(1, 1), None, torch.optim.SGD(model.parameters()))
except LaunchError as error:
    print(error)
dist.destroy_process_group()
"""


@pytest.mark.processes
def test_a_process_group_that_the_environment_does_not_mention_is_an_error() -> None:
    for told in run_on_ranks(GROUP_WITHOUT_VARIABLES, 2).stdout_of_ranks:
        assert "has a group of 2 processes, but the environment describes none" in told
        assert "LOCAL_RANK" in told


NOTEBOOK = """
import socket
import torch
from torch import nn
from pytorch_accelerated import Trainer, notebook_launcher

def train(rows):
    trainer = Trainer(model := nn.Linear(1, 1), nn.MSELoss(), torch.optim.SGD(model.parameters()), callbacks=())
    trainer.train((torch.ones(rows, 1), torch.ones(rows, 1)), 1)
    # One write: the processes share a pipe, in which a line of several writes is torn apart.
    print(f"{trainer.run_config.num_processes} {trainer.run_state.updates}\\n", end="", flush=True)

    return lambda: "no process could send this back"

with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = free.getsockname()[1]
assert notebook_launcher(train, (32,), num_processes=2, use_port=str(port)) is None
assert notebook_launcher(function=train, args=(32,), num_processes=1) is None
"""


@pytest.mark.processes
def test_the_notebook_launcher_trains_on_two_processes_together() -> None:
    lines = run_script(NOTEBOOK).stdout.splitlines()
    assert lines[:3] == ["Launching training on 2 processes.", "2 2", "2 2"]
    assert lines[-1] == "1 4"
