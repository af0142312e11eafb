"""However a script is launched, its processes train together, or it is said that they do not."""

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from accelerate.commands.launch import launch_command_parser
from accelerate.utils.launch import prepare_simple_launcher_cmd_env

from pytorch_accelerated.errors import LaunchError
from pytorch_accelerated.ranks.launching import find_world, first_host
from tests.support.processes import Output, run_forked, run_on_ranks, run_script, run_under_torchrun

SCRIPT = Path(__file__).parents[1] / "ranks" / "launch.py"


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
    }


def hydra(rank: int, size: int = 2) -> dict[str, str]:
    """What the `mpirun` of Intel MPI and of MPICH sets on one machine."""
    return {
        "PMI_SIZE": str(size),
        "PMI_RANK": str(rank),
        "MPI_LOCALNRANKS": str(size),
        "MPI_LOCALRANKID": str(rank),
    }


@pytest.mark.processes
def test_the_processes_of_srun_train_together() -> None:
    first, second = facts_of(run_on_ranks(SCRIPT, 2, launcher=[slurm(rank) for rank in range(2)]))
    assert [first["processes"], second["processes"]] == [2, 2]
    assert [first["is_first"], second["is_first"]] == [[True, True], [False, False]]
    assert first["rows"] + second["rows"] == 13
    assert first["weights"] == second["weights"]
    assert second["decorated_before"] == [None, None, "prepared"]


@pytest.mark.parametrize("launcher", [open_mpi, hydra])
def test_the_error_for_the_processes_of_an_mpi_shows_the_exports_with_which_they_train_together(
    launcher: Callable[[int], dict[str, str]],
) -> None:
    with pytest.raises(
        LaunchError, match="2 processes.*mpirun -n 2 bash -c 'export .*; exec python train.py'"
    ) as error:
        find_world(launcher(0))
    bash = ["bash", "-c", str(error.value).partition("bash -c '")[2].partition("; exec python")[0] + "; env"]
    for rank in range(2):
        told = subprocess.run(bash, env=launcher(rank), capture_output=True, text=True, check=True).stdout
        world = find_world(dict(one.split("=", 1) for one in told.splitlines()))
        assert world is not None
        assert (world.size, world.rank, world.local_rank, world.local_size) == (2, rank, rank, 2)


@pytest.mark.parametrize(
    "variables",
    [
        {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "4"},  # a shell of `salloc`
        {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"},
    ],
    ids=["salloc", "sbatch"],
)
def test_a_process_that_srun_has_not_started_trains_alone(variables: dict[str, str]) -> None:
    assert find_world(variables) is None


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
        ({"WORLD_SIZE": "2"}, "RANK=None, LOCAL_RANK=None, WORLD_SIZE=2"),
        ({"RANK": "1"}, "RANK=1, LOCAL_RANK=None, WORLD_SIZE=None"),
        ({"WORLD_SIZE": "2", "RANK": "1"}, "LOCAL_RANK=None"),
        ({"LOCAL_RANK": "1"}, "RANK=None, LOCAL_RANK=1"),
        ({"WORLD_SIZE": "2", "RANK": "2", "LOCAL_RANK": "0"}, "RANK=2"),
        ({"WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "2"}, "LOCAL_RANK=2"),
        ({"WORLD_SIZE": "4", "RANK": "3", "LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "2"}, "LOCAL_WORLD_SIZE=2"),
        ({**slurm(0), "WORLD_SIZE": "4"}, "RANK=None, LOCAL_RANK=None, WORLD_SIZE=4"),
        ({**open_mpi(0), "LOCAL_RANK": "0"}, "mpirun -n 2 bash -c"),
        ({"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}, "Set MASTER_ADDR"),
        (
            {**slurm(0), "WORLD_SIZE": "1", "RANK": "0", "GROUP_WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "x"},
            "2 copies of torchrun were started",
        ),
    ],
)
def test_a_world_in_which_a_process_cannot_find_its_place_is_an_error(variables: dict[str, str], words: str) -> None:
    with pytest.raises(LaunchError, match=words):
        find_world(variables)


def accelerate_launch(processes: int) -> dict[str, str]:
    """What `accelerate launch` sets for the one process that it starts without a GPU."""
    options = f"--cpu --num_processes {processes} --num_machines 1 --mixed_precision no --dynamo_backend no"
    given = launch_command_parser().parse_args([*options.split(), "--num_cpu_threads_per_process", "1", "train.py"])
    _, variables = prepare_simple_launcher_cmd_env(given)
    return {name: value for name, value in variables.items() if os.environ.get(name) != value}


@pytest.mark.processes
@pytest.mark.parametrize(
    "variables",
    [
        {"LOCAL_RANK": "0"},
        {"RANK": "0", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"},
        {"RANK": "0", "MASTER_ADDR": "127.0.0.1", "ACCELERATE_USE_CPU": "true"},
    ],
)
def test_a_world_of_one_is_one_process_whatever_else_is_said(variables: dict[str, str]) -> None:
    (facts,) = facts_of(run_on_ranks(SCRIPT, 1, launcher=[{"WORLD_SIZE": "1", **variables}]))
    assert facts["processes"] == 1


@pytest.mark.processes
def test_accelerate_launch_that_starts_one_process_instead_of_two_is_an_error() -> None:
    (facts,) = facts_of(run_on_ranks(SCRIPT, 1, launcher=[accelerate_launch(1)]))
    assert facts["processes"] == 1
    with pytest.raises(AssertionError, match="LaunchError: `accelerate launch` was asked for multiple") as failure:
        run_on_ranks(SCRIPT, 1, "--rate", "0.1", launcher=[accelerate_launch(2)])
    assert f"torchrun --nproc-per-node N {SCRIPT} --rate 0.1" in str(failure.value)


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
def test_a_rank_that_finds_no_others_says_where_it_waited() -> None:
    with pytest.raises(
        AssertionError, match=r"LaunchError: Rank 0 of 2 could not meet the others at 127\.0"
    ) as failure:
        run_on_ranks(NOBODY_COMES, 1, launcher=[slurm(0)])
    assert "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in str(failure.value)


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
def test_an_accelerator_that_a_function_makes_joins_the_others() -> None:
    output = run_on_ranks(GIVEN_BY_FUNCTION, 2, launcher=[slurm(rank) for rank in range(2)])
    assert output.stdout_of_ranks[0].endswith("2\n")


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
    # In a process of its own: accelerate starts none where bitsandbytes has been imported.
    lines = run_script(NOTEBOOK).stdout.splitlines()
    assert lines[1:3] == ["2 2", "2 2"]
    assert lines[-1] == "1 4"
