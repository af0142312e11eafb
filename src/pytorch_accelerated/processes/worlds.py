"""Finds the processes that belong together, from the environment variables that launchers set.

This module neither changes the environment nor talks to other processes. `docs/design/launching.md` lists the
variables.
"""

from __future__ import annotations

import contextlib
import os
import re
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pytorch_accelerated.errors import LaunchError

if TYPE_CHECKING:
    import psutil

_LOOPBACK = "127.0.0.1"
# Below the ports that operating systems assign, above those that services use.
_FIRST_PORT, _NUM_PORTS = 10000, 20000
_DEFAULT_PORT = 29500  # torch's default
_TOO_MANY_TORCHRUNS = (
    "{launcher} started {size} copies of torchrun, but this one was told to run alone (--nnodes is 1): each copy "
    "would train by itself, and all would write to the same files. Start it with: torchrun --nnodes {size} "
    "--nproc-per-node "
    "N --rdzv-backend c10d --rdzv-endpoint HOST_OF_RANK_0:29500 train.py"
)


@dataclass(frozen=True)
class World:
    """The processes that train together, and the place of this process among them.

    Attributes:
        launcher: the launcher's name, for messages.
        size: the number of processes.
        rank: the number of this process among all, from 0.
        local_rank: the number of this process on its machine, from 0.
        local_size: the number of processes on its machine, if known.
        address: the machine of rank 0.
        port: the port on which rank 0 waits for the others.
    """

    launcher: str
    size: int
    rank: int
    local_rank: int
    local_size: int | None
    address: str
    port: int

    @property
    def variables(self) -> dict[str, str]:
        """The variables that torchrun would set, which torch and accelerate read."""
        values = {
            "WORLD_SIZE": self.size,
            "RANK": self.rank,
            "LOCAL_RANK": self.local_rank,
            "LOCAL_WORLD_SIZE": self.local_size,
            "MASTER_ADDR": self.address,
            "MASTER_PORT": self.port,
        }
        return {name: str(value) for name, value in values.items() if value is not None}


@dataclass(frozen=True)
class _Family:
    """The variables of one MPI, or of several that use the same ones."""

    launcher: str
    size: str
    rank: str
    local_rank: str
    local_size: str


_MPI_FAMILIES = (
    _Family(
        "Open MPI",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    _Family(
        "MVAPICH",
        "MV2_COMM_WORLD_SIZE",
        "MV2_COMM_WORLD_RANK",
        "MV2_COMM_WORLD_LOCAL_RANK",
        "MV2_COMM_WORLD_LOCAL_SIZE",
    ),
    _Family("MPI (Intel MPI or MPICH)", "PMI_SIZE", "PMI_RANK", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)
# Variables that distinguish two jobs on one machine; the first that is set is used.
_JOB_IDS = ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "PMI_JOBID", "LSB_JOBID", "PBS_JOBID")
_MPI_LAUNCHERS = ("mpirun", "mpiexec", "hydra", "pmi_proxy", "orted", "prted", "orterun", "prterun")


def find_world(variables: Mapping[str, str] = os.environ) -> World | None:
    """The world that a launcher put this process in, or None if it is on its own.

    torchrun's variables (`RANK` and `WORLD_SIZE`), which torch defines and many launchers set, take precedence over
    those of Slurm or MPI, which often start torchrun.

    Args:
        variables: the environment variables.

    Raises:
        LaunchError: if a world was requested, but the variables are incomplete or contradict each other.
    """
    outer = _slurm_world(variables) or _mpi_world(variables)
    size, rank = _number(variables, "WORLD_SIZE"), _number(variables, "RANK")
    if size is None and rank in (None, 0):
        return outer
    if outer is not None and variables.get("GROUP_WORLD_SIZE") == "1" and "TORCHELASTIC_RUN_ID" in variables:
        raise LaunchError(_TOO_MANY_TORCHRUNS.format(launcher=outer.launcher, size=outer.size))
    if size is None or (rank is None and outer is not None and outer.size != size):
        others = "nothing else tells" if outer is None else f"{outer.launcher} started {outer.size}"
        raise LaunchError(
            f"The environment has RANK={rank} and WORLD_SIZE={size}, but {others} how many processes train together. "
            "Unset these variables, or set both, as torchrun does: torchrun --nproc-per-node N train.py"
        )
    if size == 1:
        return None
    fitting = outer if outer is not None and outer.size == size and rank in (None, outer.rank) else None
    local_rank = _number(variables, "LOCAL_RANK")
    if fitting is not None:
        rank = fitting.rank
        local_rank = fitting.local_rank if local_rank is None else local_rank
    missing = [name for name, value in (("RANK", rank), ("LOCAL_RANK", local_rank)) if value is None]
    if missing:
        raise LaunchError(
            f"The environment asks for {size} processes that train together (WORLD_SIZE={size}), but has no "
            f"{' and no '.join(missing)}, so this process cannot know its place. Set RANK, and LOCAL_RANK (its number "
            "on its machine, from 0), or start with: torchrun --nproc-per-node N train.py"
        )
    assert rank is not None
    assert local_rank is not None
    if not 0 <= rank < size:
        raise LaunchError(f"The environment has RANK={rank} and WORLD_SIZE={size}; ranks go from 0 to {size - 1}.")
    local_size = _number(variables, "LOCAL_WORLD_SIZE")
    return World(
        launcher="the launcher",
        size=size,
        rank=rank,
        local_rank=local_rank,
        local_size=local_size,
        address=_address(
            variables, on_one_machine=local_size == size, host=None if fitting is None else fitting.address
        ),
        port=_port(variables, None) if fitting is None else fitting.port,
    )


def batch_script_tasks(variables: Mapping[str, str] = os.environ) -> int | None:
    """The number of tasks of a Slurm job if this process was started without `srun`, else None."""
    tasks = _number(variables, "SLURM_NTASKS")
    return tasks if tasks is not None and tasks > 1 and not _is_slurm_task(variables) else None


def _slurm_world(variables: Mapping[str, str]) -> World | None:
    size = _number(variables, "SLURM_STEP_NUM_TASKS") or _number(variables, "SLURM_NTASKS")
    if size is None or size == 1 or not _is_slurm_task(variables):
        return None
    rank, local_rank = _number(variables, "SLURM_PROCID"), _number(variables, "SLURM_LOCALID")
    nodes = variables.get("SLURM_STEP_NODELIST") or variables.get("SLURM_JOB_NODELIST")
    num_nodes = _number(variables, "SLURM_STEP_NUM_NODES") or _number(variables, "SLURM_NNODES")
    if rank is None or local_rank is None:
        raise LaunchError(
            f"Slurm started {size} tasks, but does not tell this one its place (SLURM_PROCID={rank}, "
            f"SLURM_LOCALID={local_rank}). Start with: srun python train.py"
        )
    local_size, job = _slurm_tasks_of_node(variables), variables.get("SLURM_JOB_ID")
    return World(
        launcher="srun",
        size=size,
        rank=rank,
        local_rank=local_rank,
        local_size=local_size,
        address=_address(
            variables,
            on_one_machine=num_nodes == 1 or local_size == size,
            host=None if nodes is None else first_host(nodes),
        ),
        port=_port(variables, None if job is None else f"{job}.{variables.get('SLURM_STEP_ID', '')}"),
    )


def _is_slurm_task(variables: Mapping[str, str]) -> bool:
    """Whether `srun` started this process.

    A batch script is also task 0 of its job, but only `srun` starts the other tasks, as steps of the job.
    """
    if "SLURM_STEP_NUM_TASKS" in variables:
        return True
    if "SLURM_PROCID" not in variables or variables.get("ENVIRONMENT") == "BATCH":
        return False
    # A script may change its environment; the Slurm daemon above a batch script is called "slurmstepd: [7.batch]".
    return not any(re.match(r"slurmstepd: \[.*\.(batch|interactive)\]", " ".join(words)) for _, words in ancestors())


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
    entry = re.match(r"(?:[^,\[]|\[[^\]]*\])+", node_list)
    if entry is None:
        raise LaunchError(f"Slurm's list of nodes is {node_list!r}, which contains no host. Set MASTER_ADDR.")
    return re.sub(r"\[([^],-]*)[^]]*\]", r"\1", entry[0])


def _mpi_world(variables: Mapping[str, str]) -> World | None:
    for family in _MPI_FAMILIES:
        size = _number(variables, family.size)
        if size is None or size == 1:
            continue
        rank, local_rank = _number(variables, family.rank), _number(variables, family.local_rank)
        local_size = _number(variables, family.local_size)
        if rank is None or local_rank is None:
            raise LaunchError(
                f"{family.launcher} started {size} processes, but does not tell this one its place ({family.rank}="
                f"{rank}, {family.local_rank}={local_rank}). Use torchrun instead, or set RANK and LOCAL_RANK."
            )
        nodes = variables.get("SLURM_JOB_NODELIST")
        return World(
            launcher=family.launcher,
            size=size,
            rank=rank,
            local_rank=local_rank,
            local_size=local_size,
            address=_address(
                variables, on_one_machine=local_size == size, host=None if nodes is None else first_host(nodes)
            ),
            port=_port(variables, _mpi_job_id(variables, on_one_machine=local_size == size)),
        )
    return None


def _mpi_job_id(variables: Mapping[str, str], *, on_one_machine: bool) -> str | None:
    told = next((variables[name] for name in _JOB_IDS if name in variables), None)
    if told is not None or not on_one_machine:
        return told
    # All processes of a machine have one launcher above them.
    for process, words in ancestors():
        if words and any(name in os.path.basename(words[0]) for name in _MPI_LAUNCHERS):
            return str(process.pid)
    return None


def ancestors() -> Iterator[tuple[psutil.Process, list[str]]]:
    """The ancestors of this process, nearest first, with their command lines."""
    import psutil  # comes with accelerate

    with contextlib.suppress(psutil.Error):
        for process in psutil.Process().parents():
            yield process, process.cmdline()


def _address(variables: Mapping[str, str], *, on_one_machine: bool, host: str | None) -> str:
    told = variables.get("MASTER_ADDR")
    if told:
        return told
    if on_one_machine:
        return _LOOPBACK
    if host is None:
        raise LaunchError(
            "The processes are on several machines, and the name of the first one is unknown. Set MASTER_ADDR to the "
            "host of rank 0 for all of them; with Open MPI: mpirun -x MASTER_ADDR=HOST ... python train.py; with "
            "Intel MPI or MPICH: mpirun -genv MASTER_ADDR HOST ... python train.py"
        )
    return host


def _port(variables: Mapping[str, str], job: str | None) -> int:
    told = _number(variables, "MASTER_PORT")
    if told is not None:
        return told
    return _DEFAULT_PORT if job is None else _FIRST_PORT + zlib.crc32(job.encode()) % _NUM_PORTS


def _number(variables: Mapping[str, str], name: str) -> int | None:
    value = variables.get(name)
    if not value:
        return None
    try:
        return int(value)
    except ValueError:
        raise LaunchError(
            f"The environment has {name}={value!r}, which is not an integer. Unset it, or set it as launchers do."
        ) from None
