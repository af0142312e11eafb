"""Runs scripts as a user would, in separate processes."""

import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.dispositions import default_signals
from tests.support.ending import kill_with_children

REPOSITORY = Path(__file__).parents[2]
# Before the folders given by hand, such as one with another version of a package.
_OWN = (REPOSITORY / "src", REPOSITORY, REPOSITORY / "tests" / "support")
_PYTHON_PATH = os.pathsep.join(filter(None, [*map(str, _OWN), os.environ.get("PYTHONPATH")]))
# Inherited variables of a launcher or settings of the tests would change what a script does.
_LAUNCH_VARIABLES = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
_SETTINGS = ("ACCELERATE_", "PT_ACC_", "TORCHELASTIC_", "SLURM_", "OMPI_", "PMI", "MPI_", "MV2_")
# A script that has not ended by then never will, even on a busy machine. Gloo waits longer for a missing rank.
TIME_LIMIT_SECONDS = 600
# Otherwise each of the many processes would compile the package again.
_SLOWING_VARIABLES = {"PYTHONDONTWRITEBYTECODE"}


@dataclass(frozen=True)
class Output:
    """The output of a script.

    Attributes:
        stdout: all of it, rank after rank.
        stderr: all of it, first that of the launcher, then rank after rank.
        stdout_of_ranks: the standard output of each rank.
    """

    stdout: str
    stderr: str
    stdout_of_ranks: tuple[str, ...]


def run_script(
    script: str | Path,
    *args: object,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    timeout_seconds: float = TIME_LIMIT_SECONDS,
) -> Output:
    """Run `script` in one process, and return its output.

    Args:
        script: a path, or the source itself as a string.
        args: its command line arguments.
        env: environment variables on top of the usual ones. GPUs are hidden unless ``CUDA_VISIBLE_DEVICES`` is given.
        cwd: the working directory; the current one by default.
        timeout_seconds: after this time the script and its descendants are killed.

    Raises:
        AssertionError: if it fails or takes too long; the message has its whole output.
    """
    return _run(script, args, world_size=None, env=env, cwd=cwd, timeout_seconds=timeout_seconds)


def run_under_torchrun(script: str | Path, world_size: int, *args: object, **options: Any) -> Output:
    """Run `script` on `world_size` processes under torchrun, at a free port. Otherwise like `run_script`."""
    return _run(script, args, world_size=world_size, **options)


def environment_on(device: str) -> dict[str, str]:
    """What DeepSpeed finds this device by in a script, "cpu" or "gpu"."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0")
    return {"DS_ACCELERATOR": "cpu"} if device == "cpu" else {"DS_ACCELERATOR": "cuda", "CUDA_VISIBLE_DEVICES": visible}


def run_on_ranks(script: str | Path, world_size: int, *args: object, **options: Any) -> Output:
    """Run `script` on `world_size` ranks that find each other as under torchrun, with everything already imported.

    This is much quicker, and the same for a script. Tests of a launcher's output, or of what happens during imports,
    need one of the other functions. Arguments and errors are those of `run_script`; ``launcher`` has the variables that
    a launcher sets for each rank, instead of torchrun's.
    """
    return _run_forked(script, world_size, args, **options)


def run_forked(script: str | Path, *args: object, **options: Any) -> Output:
    """Like `run_script`, in a process in which everything is already imported."""
    return _run_forked(script, None, args, **options)


def _run_forked(
    script: str | Path,
    world_size: int | None,
    args: Sequence[object],
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    timeout_seconds: float = TIME_LIMIT_SECONDS,
    launcher: Sequence[Mapping[str, str]] | None = None,
) -> Output:
    with tempfile.TemporaryDirectory() as folder:
        request = {
            "script": str(_script_in(folder, script)),
            "args": list(map(str, args)),
            "env": {**_clean_environment(), **(env or {})},
            "cwd": str(cwd or Path.cwd()),
            "world_size": world_size,
            "launcher": None if launcher is None else list(map(dict, launcher)),
            "logs": folder,
            "timeout_seconds": timeout_seconds,
        }
        server = _fork_server()
        assert server.stdin is not None
        assert server.stdout is not None
        server.stdin.write(json.dumps(request) + "\n")
        server.stdin.flush()
        answer = json.loads(server.stdout.readline())
        ranks = range(len(answer["codes"]))
        stdout_of_ranks = tuple((Path(folder) / f"{rank}.out").read_text(encoding="utf-8") for rank in ranks)
        stderr = "".join((Path(folder) / f"{rank}.err").read_text(encoding="utf-8") for rank in ranks)
    output = Output("".join(stdout_of_ranks), stderr, stdout_of_ranks)
    ending = f"did not end within {timeout_seconds} seconds"
    if not answer["is_late"]:
        ending = f"ended with exit code {', '.join(map(_shown_code, answer['codes']))}"
    _check_ending(script, ending, not any(answer["codes"]), output)
    return output


def _shown_code(code: int) -> str:
    return str(code) if code >= 0 else signal.Signals(-code).name


@functools.cache
def _fork_server() -> "subprocess.Popen[str]":
    """The process that forks; it lives as long as this one."""
    script = Path(__file__).with_name("fork_server.py")
    with default_signals():
        return subprocess.Popen(
            [sys.executable, str(script)],
            env=_clean_environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            encoding="utf-8",
        )


def start_on_ranks(
    script: Path,
    world_size: int,
    *args: object,
    options: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    log: Path,
) -> "subprocess.Popen[bytes]":
    """Start `script` under torchrun, without waiting for it.

    Args:
        script: its path.
        world_size: the number of ranks.
        args: its command line arguments.
        options: further options of torchrun.
        env: environment variables on top of the usual ones.
        log: the file for its output.
    """
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world_size), *options]
    command = [sys.executable, *launcher, str(script), *map(str, args)]
    return start(command, env=env, log=log)


def start(command: Sequence[str], *, log: Path, env: Mapping[str, str] | None = None) -> "subprocess.Popen[bytes]":
    """Start `command` without waiting for it. Its output goes to the file `log`."""
    with log.open("w") as output, default_signals():
        return subprocess.Popen(
            command,
            env={**_clean_environment(), **(env or {})},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )


def _run(
    script: str | Path,
    args: Sequence[object],
    *,
    world_size: int | None,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    timeout_seconds: float = TIME_LIMIT_SECONDS,
) -> Output:
    with tempfile.TemporaryDirectory() as folder:
        path = _script_in(folder, script)
        launcher = [] if world_size is None else _torchrun(world_size, log_folder=folder)
        with default_signals():
            process = subprocess.Popen(
                [sys.executable, *launcher, str(path), *map(str, args)],
                cwd=cwd,
                env={**_clean_environment(), **(env or {})},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                encoding="utf-8",
            )
        try:
            stdout, stderr = process.communicate(timeout=timeout_seconds)
            ending = f"ended with exit code {process.returncode}"
        except subprocess.TimeoutExpired:
            kill_with_children(process.pid)
            stdout, stderr = process.communicate()
            ending = f"did not end within {timeout_seconds} seconds"
        stdout_of_ranks = _read_logs(folder, "stdout.log") if launcher else (stdout,)
        stderr += "".join(_read_logs(folder, "stderr.log"))
    output = Output("".join(stdout_of_ranks), stderr, stdout_of_ranks)
    _check_ending(path, ending, process.returncode == 0, output)
    return output


def _script_in(folder: str, script: str | Path) -> Path:
    """The path of a script, which is written to `folder` if it is given as source."""
    if not isinstance(script, str):
        return script.resolve()
    path = Path(folder) / "script.py"
    path.write_text(script, encoding="utf-8")
    return path


def _check_ending(script: str | Path, ending: str, is_good: bool, output: Output) -> None:
    name = script.name if isinstance(script, Path) else "script.py"
    assert is_good, f"{name} {ending}\n--- stdout\n{output.stdout}\n--- stderr\n{output.stderr}"


def _torchrun(world_size: int, *, log_folder: str) -> list[str]:
    # Each rank prints to separate files: processes that share a pipe interrupt each other's lines.
    logging = ["--redirects", "3", "--log-dir", log_folder]
    return ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world_size), *logging]


def _read_logs(log_folder: str, name: str) -> tuple[str, ...]:
    """The output that torchrun wrote per rank, in the folders ``run/attempt/rank``."""
    files = Path(log_folder).glob(f"*/*/*/{name}")
    return tuple(file.read_text(encoding="utf-8") for file in sorted(files, key=lambda file: int(file.parent.name)))


def _clean_environment() -> dict[str, str]:
    inherited = {
        name: value
        for name, value in os.environ.items()
        if name not in _LAUNCH_VARIABLES | _SLOWING_VARIABLES and not name.startswith(_SETTINGS)
    }
    return {**inherited, "PYTHONPATH": _PYTHON_PATH, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
