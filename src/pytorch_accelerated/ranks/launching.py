"""Joins the processes of a run, however they were started, or refuses to run without the others.

This is the only module that knows launchers: torchrun, whose variables torch and accelerate read, and Slurm's `srun`.
`docs/design/launching.md` has the rules.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import shlex
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import accelerate
import torch
import torch.distributed as dist

from pytorch_accelerated.errors import LaunchError

_LOOPBACK = "127.0.0.1"
# Below the ports that operating systems assign, above those that services use.
_FIRST_PORT, _NUM_PORTS = 10000, 20000
_DEFAULT_PORT = 29500  # torch's default
_TORCHRUN_VARIABLES = ("WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
# Open MPI sets the same under these names, Intel MPI and MPICH under the names in the second row.
_MPI_VARIABLES = (
    ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("PMI_SIZE", "PMI_RANK", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)


@dataclass(frozen=True)
class World:
    """The processes that train together, and the place of this process among them.

    Attributes:
        size: the number of processes.
        rank: the number of this process among all, from 0.
        local_rank: the number of this process on its machine, from 0.
        local_size: the number of processes on its machine, if known.
        address: the machine of rank 0.
        port: the port on which rank 0 waits for the others.
    """

    size: int
    rank: int
    local_rank: int
    local_size: int | None
    address: str
    port: int

    @property
    def variables(self) -> dict[str, str]:
        """The variables that torchrun would set, which torch and accelerate read."""
        places = (self.size, self.rank, self.local_rank, self.local_size)
        values = {**dict(zip(_TORCHRUN_VARIABLES, places, strict=True)), "MASTER_ADDR": self.address}
        values["MASTER_PORT"] = self.port
        return {name: str(value) for name, value in values.items() if value is not None}


def find_world(variables: Mapping[str, str] = os.environ) -> World | None:
    """The world that a launcher put this process in, or None if it is on its own.

    torchrun's variables, which torch defines and many launchers set, take precedence over those of Slurm, which often
    starts torchrun.

    Args:
        variables: the environment variables.

    Raises:
        LaunchError: if a world was requested, but the variables are incomplete or contradict each other.
    """
    size, rank, local_rank, local_size = (_number(variables, name) for name in _TORCHRUN_VARIABLES)
    of_slurm = _slurm_world(variables)
    if of_slurm is not None and variables.get("GROUP_WORLD_SIZE") == "1" and "TORCHELASTIC_RUN_ID" in variables:
        raise LaunchError(
            f"{of_slurm.size} copies of torchrun were started, but this one was told to run alone (--nnodes is 1): "
            "each would train by itself, and all would write to the same files. Start it with: torchrun --nnodes "
            f"{of_slurm.size} --nproc-per-node N --rdzv-backend c10d --rdzv-endpoint HOST_OF_RANK_0:29500 train.py"
        )
    if of_slurm is not None and size in (None, of_slurm.size) and rank in (None, of_slurm.rank):
        return of_slurm
    if size is None:
        _refuse_processes_of_mpi(variables)
    if size == 1 or (size is None and not rank and (local_rank or -1) == -1):
        return None
    if (
        size is None
        or rank is None
        or local_rank is None
        or not (0 <= rank < size and 0 <= local_rank < (local_size or size) <= size)
    ):
        raise LaunchError(
            f"The environment has RANK={rank}, LOCAL_RANK={local_rank}, WORLD_SIZE={size} and "
            f"LOCAL_WORLD_SIZE={local_size}: some are missing or can't all be true. Set all, as torchrun does, or "
            "unset them: torchrun --nproc-per-node N train.py"
        )
    address = _address(variables, on_one_machine=local_size == size, host=None)
    return World(size, rank, local_rank, local_size, address, _port(variables, None))


def _refuse_processes_of_mpi(variables: Mapping[str, str]) -> None:
    for theirs in _MPI_VARIABLES:
        size = _number(variables, theirs[0]) or 1
        if size > 1:
            exports = " ".join(f"{ours}=${name}" for ours, name in zip(_TORCHRUN_VARIABLES, theirs, strict=True))
            raise LaunchError(
                f"An MPI started {size} processes ({theirs[0]}={size}), but torch's variables are not set, so each "
                "would train on its own and overwrite the others' files. Use torchrun, or set them (on several "
                f"machines MASTER_ADDR too): mpirun -n {size} bash -c 'export {exports}; exec python train.py'."
            )


def _slurm_world(variables: Mapping[str, str]) -> World | None:
    # Only `srun` sets the variables of a step. A batch script has the others, too.
    size = _number(variables, "SLURM_STEP_NUM_TASKS")
    if size is None or size == 1:
        return None
    rank, local_rank = _number(variables, "SLURM_PROCID"), _number(variables, "SLURM_LOCALID")
    nodes = variables.get("SLURM_STEP_NODELIST") or variables.get("SLURM_JOB_NODELIST")
    num_nodes = _number(variables, "SLURM_STEP_NUM_NODES") or _number(variables, "SLURM_NNODES")
    if rank is None or local_rank is None:
        return None
    local_size, job = _slurm_tasks_of_node(variables), variables.get("SLURM_JOB_ID")
    is_on_one = num_nodes == 1 or local_size == size
    address = _address(variables, on_one_machine=is_on_one, host=None if nodes is None else first_host(nodes))
    port = _port(variables, None if job is None else f"{job}.{variables.get('SLURM_STEP_ID', '')}")
    return World(size, rank, local_rank, local_size, address, port)


def _slurm_tasks_of_node(variables: Mapping[str, str]) -> int | None:
    """The number of tasks of a node, from a list such as ``4(x2),3`` and the number of the node."""
    told = variables.get("SLURM_STEP_TASKS_PER_NODE") or variables.get("SLURM_TASKS_PER_NODE") or ""
    counts: list[int] = []
    for count, repeats in re.findall(r"(\d+)(?:\(x(\d+)\))?", told):
        counts += [int(count)] * int(repeats or 1)
    node = _number(variables, "SLURM_NODEID")
    return counts[node] if node is not None and node < len(counts) else None


def first_host(node_list: str) -> str:
    """The first host of a list as Slurm writes it, such as ``gpu[007-012,020],login1``."""
    return re.sub(r"\[([^],-]*)[^]]*\]", r"\1", node_list).partition(",")[0]


def _address(variables: Mapping[str, str], *, on_one_machine: bool, host: str | None) -> str:
    told = variables.get("MASTER_ADDR")
    if told:
        return told
    if on_one_machine:
        return _LOOPBACK
    if host is None:
        raise LaunchError(
            "The processes may be on multiple machines, and the name of the first one is unknown. Set MASTER_ADDR to "
            f"the host of rank 0 for all of them ({_LOOPBACK} on one machine), or start with torchrun."
        )
    return host


def _port(variables: Mapping[str, str], job: str | None) -> int:
    told = _number(variables, "MASTER_PORT")
    if told is not None:
        return told
    return _DEFAULT_PORT if job is None else _FIRST_PORT + zlib.crc32(job.encode()) % _NUM_PORTS


def _number(variables: Mapping[str, str], name: str) -> int | None:
    value = variables.get(name)
    return int(value) if value else None


def join_world() -> World | None:
    """Return the world of this process after announcing it to torch and accelerate in torchrun's variables.

    Return None if the process is on its own. Must be called before anything asks accelerate about processes.

    Raises:
        LaunchError: if a world was requested and this process cannot find its place in it.
    """
    world = find_world()
    if world is not None:
        os.environ.update(world.variables)
    elif {"WORLD_SIZE", "LOCAL_RANK"} <= os.environ.keys():  # accelerate makes a group of this one process
        for name, value in (("RANK", "0"), ("MASTER_ADDR", _LOOPBACK), ("MASTER_PORT", "0")):
            os.environ.setdefault(name, value)
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() != (1 if world is None else world.size):
        size = dist.get_world_size()
        raise LaunchError(
            f"torch.distributed has a group of {size} processes, but the environment describes "
            f"{'none' if world is None else world.size}. Before the trainer is created, set WORLD_SIZE={size}, RANK "
            "and LOCAL_RANK in each process, as torchrun does."
        )
    return world


@contextlib.contextmanager
def meeting(world: World | None) -> Iterator[None]:
    """Wrap the creation of the process group.

    Raises:
        LaunchError: instead of torch's errors, if the processes don't find each other.
    """
    try:
        yield
    except (dist.DistError, RuntimeError) as error:
        if world is None or dist.is_initialized():
            raise
        reason = str(error).partition("\n")[0]
        raise LaunchError(
            f"Rank {world.rank} of {world.size} could not meet the others at {world.address}:{world.port} ({reason}). "
            "Check that all of them were started, that their machines reach this address (MASTER_ADDR, MASTER_PORT), "
            "and that nothing else uses the port. GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME choose the network. Where "
            "torchrun restarts processes, set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1."
        ) from error


def must_group_on_cpu(world: World | None) -> bool:
    """Whether accelerate must be told to use the CPU.

    Otherwise accelerate lets the processes that torchrun starts on a machine without an accelerator run side by side,
    each as if it were alone; and whichever call comes first in a process decides.
    """
    return world is not None and not torch.accelerator.is_available()


def check_group(state: Any, world: World | None) -> None:
    """Make sure that the processes that were requested train together.

    Args:
        state: an `Accelerator` or a `PartialState`.
        world: the return value of `join_world`.

    Raises:
        LaunchError: if they don't. Each would train on its own, and they would overwrite each other's files.
    """
    size = int(state.num_processes)
    if world is not None and size != world.size:
        raise LaunchError(
            f"{world.size} processes were started that should train together (WORLD_SIZE={world.size}), but accelerate "
            f"created a group of {size}. Don't use accelerate before the trainer is created: pass a function as "
            "`Trainer(accelerator=...)`. With a GPU, check that each process sees one; without, set "
            "ACCELERATE_USE_CPU=true, but not for DeepSpeed."
        )
    # `accelerate launch` tells one process on each machine where it would meet others, and starts no others.
    is_alone = world is None and "WORLD_SIZE" not in os.environ
    if size == 1 and is_alone and {"ACCELERATE_USE_CPU", "MASTER_ADDR"} <= os.environ.keys():
        raise LaunchError(
            "`accelerate launch` was asked for multiple processes, but one trains alone: without GPUs it starts one "
            f"process on each machine. Ask for one, or start them with: torchrun --nproc-per-node N "
            f"{shlex.join(sys.argv)}"
        )


def notebook_launcher(
    function: Callable[..., Any], args: Sequence[Any] = (), num_processes: int | None = None, **options: Any
) -> None:
    """Call a function in multiple new processes, or in this one if `num_processes` is 1.

    The processes are copies of this one: the function makes the trainer, and nothing may have used a GPU before. What
    it returns is lost; write results to files.

    Args:
        function: to call in each process.
        args: its arguments.
        num_processes: how many, as for `accelerate.notebook_launcher`.
        options: further arguments of that function, by name.
    """

    @functools.wraps(function)
    def without_result(*args: Any) -> None:
        function(*args)  # torch would fail to send back a result that cannot be pickled

    accelerate.notebook_launcher(without_result, tuple(args), num_processes, **options)
