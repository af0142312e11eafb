"""Joins the processes of a run, however they were started, or refuses to run without the others.

This is the only module that knows launchers. `docs/design/launching.md` has the rules.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shlex
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate.commands.config.config_args import default_config_file, load_config_from_file
from accelerate.commands.launch import launch_command_parser

from pytorch_accelerated.errors import LaunchError
from pytorch_accelerated.processes.worlds import World, ancestors, batch_script_tasks, find_world

# One of these is in the environment of every process that `accelerate launch` starts.
_VARIABLES_OF_ACCELERATE_LAUNCH = {"ACCELERATE_USE_CPU", "ACCELERATE_MIXED_PRECISION"}
_PROGRAMS_WITH_COMMANDS = ("accelerate", "accelerate.commands.accelerate_cli")
_PROGRAMS = ("accelerate-launch", "accelerate.commands.launch")


def join_world() -> World | None:
    """Return the world of this process after announcing it to torch and accelerate in torchrun's variables.

    Return None if the process is on its own. Must be called before anything asks accelerate about processes.

    Raises:
        LaunchError: if a world was requested and this process cannot find its place in it.
    """
    world = find_world()
    if world is not None:
        os.environ.update(world.variables)
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() != (1 if world is None else world.size):
        size = dist.get_world_size()
        raise LaunchError(
            f"torch.distributed has a group of {size} processes, but the environment describes "
            f"{'none' if world is None else world.size}, so this process would train on its own, beside the others. "
            f"Before the trainer is created, set in each process: WORLD_SIZE={size}, RANK, and LOCAL_RANK (its number "
            "on "
            "its machine, from 0), as torchrun does."
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
        is_restarted = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
        hint = ""
        if is_restarted and os.environ.get("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "0") in ("", "0"):
            hint = (
                " torchrun has restarted this process and may have kept messages of the previous processes: start it "
                "with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1."
            )
        raise LaunchError(
            f"Rank {world.rank} of {world.size} could not meet the others at {world.address}:{world.port} ({reason}). "
            "Check that all of them were started, that their machines reach this address, and that nothing else uses "
            "the port. MASTER_ADDR and MASTER_PORT in the environment choose others; GLOO_SOCKET_IFNAME or "
            f"NCCL_SOCKET_IFNAME choose the network.{hint}"
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
        told = "" if world.launcher == "the launcher" else f" by {world.launcher}"
        raise LaunchError(
            f"{world.size} processes were started{told} that should train together (WORLD_SIZE={world.size}), but "
            f"accelerate created a group of {size}. Each would train on its own and overwrite the others' files. "
            f"{_remedy(world)}"
        )
    asked = _accelerate_launch()
    if asked is not None and asked.processes not in (1, size):
        raise LaunchError(
            f"`accelerate launch` was asked for {asked.processes} processes by {asked.source}, but "
            f"{'one trains alone' if size == 1 else f'{size} train together'}: on CPUs it starts one process on each "
            f"machine. Start them with: {asked.command}"
        )
    if size == 1 and (tasks := batch_script_tasks()) is not None:
        warnings.warn(
            f"Slurm has allocated {tasks} tasks, but this process was not started by srun: it trains alone. To train "
            "with all of them use: srun python train.py",
            stacklevel=5,  # the line that creates the trainer
        )


def _remedy(world: World) -> str:
    if torch.accelerator.is_available():
        return "Check that this process sees a device, and don't use accelerate before the trainer is created."
    return (
        "On a machine without an accelerator set ACCELERATE_USE_CPU=true, or don't use accelerate before the trainer "
        "is created: pass a function as `Trainer(accelerator=...)`."
    )


@dataclass(frozen=True)
class _AccelerateLaunch:
    """The number of processes and machines that `accelerate launch` was asked for."""

    processes: int
    source: str
    command: str


@functools.cache
def _accelerate_launch() -> _AccelerateLaunch | None:
    """The settings of the `accelerate launch` above this process, from its command line and its file; None if there is
    none.
    """
    if not _VARIABLES_OF_ACCELERATE_LAUNCH & os.environ.keys():
        return None
    for process, words in ancestors():
        programs = [os.path.basename(word) for word in words[:4]]
        start = next((place for place, name in enumerate(programs) if name in _PROGRAMS), None)
        if start is not None:
            return _settings_of(words[start + 1 :], folder=Path(process.cwd()))
        start = next((place for place, name in enumerate(programs) if name in _PROGRAMS_WITH_COMMANDS), None)
        if start is not None and words[start + 1 : start + 2] == ["launch"]:
            return _settings_of(words[start + 2 :], folder=Path(process.cwd()))
        if programs and programs[0].startswith("python"):
            return None  # the launched program, which has started this process itself
    return None


def _settings_of(words: list[str], *, folder: Path) -> _AccelerateLaunch | None:
    """The settings that `accelerate launch`, called in `folder`, derives from its arguments."""
    try:
        given = launch_command_parser().parse_args(words)
    except SystemExit:  # from a different version
        return None
    settings, source = given, "its command line"
    if given.config_file is not None or (os.path.isfile(default_config_file) and not given.cpu):
        file = folder / (given.config_file or default_config_file)
        settings = load_config_from_file(str(file))
        source = str(file) if given.num_processes is None else source
    processes = given.num_processes or getattr(settings, "num_processes", None)
    if processes is None:
        return None
    machines = given.num_machines or getattr(settings, "num_machines", None) or 1
    command = f"torchrun --nproc-per-node {processes // machines} {shlex.join(_script(given))}"
    if machines > 1:
        address = given.main_process_ip or getattr(settings, "main_process_ip", None) or "HOST_OF_RANK_0"
        port = given.main_process_port or getattr(settings, "main_process_port", None) or 29500
        rank = given.machine_rank if given.machine_rank is not None else getattr(settings, "machine_rank", 0)
        command = command.replace(
            "torchrun",
            f"torchrun --nnodes {machines} --node-rank {rank} --master-addr {address} --master-port {port}",
        )
    return _AccelerateLaunch(int(processes), source, command)


def _script(given: Any) -> list[str]:
    is_module = ["--module"] if given.module else ["--no-python"] if given.no_python else []
    return [*is_module, given.training_script, *given.training_script_args]
