"""Trains a run again in new processes: killed and resumed, on two ranks, or a part of it in each."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import pickle
import re
import runpy
import shutil
import signal
import subprocess
import sys
import types
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.elastic.utils.distributed import get_free_port

from pytorch_accelerated.callbacks import TrainerCallback, on
from pytorch_accelerated.errors import PytorchAcceleratedError
from pytorch_accelerated.extras.looking.rehearsal import QuietLimit, taking_part
from pytorch_accelerated.extras.proving.factory import make_run
from pytorch_accelerated.extras.proving.outside import Outside
from pytorch_accelerated.extras.proving.rewind import trained_again
from pytorch_accelerated.extras.proving.trace import Trace, UpdateTrace
from pytorch_accelerated.facts import is_users_class

if TYPE_CHECKING:
    from pytorch_accelerated import Trainer

_IS_CHILD = "PT_ACC_IS_PROVING"
_MAIN = b"__main__"
_REMEDY = "pass `factory`, a function of a module or a script that returns a new trainer and the arguments of `train`"


class NotCheckedError(PytorchAcceleratedError):
    """Something cannot be checked."""


class Saving(TrainerCallback):
    """Saves a training state at the beginning and after each update, named by their number.

    Args:
        folder: for the states.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def on_training_run_start(self, trainer: Trainer, **kwargs: Any) -> None:
        """Save the beginning, but not that of a resumed run."""
        if trainer.run_state.updates == 0:
            self.on_optimizer_step_end(trainer)

    def on_optimizer_step_end(self, trainer: Trainer, **kwargs: Any) -> None:
        """Save, and remove the state before the last one, but not that of the beginning."""
        updates = trainer.run_state.updates
        trainer.save_training_state(self._folder / str(updates))
        if updates > 2:
            shutil.rmtree(self._folder / str(updates - 2), ignore_errors=True)


@dataclasses.dataclass(frozen=True)
class Job:
    """What a child does.

    Attributes:
        payload: what makes its trainer, and what it does with it, from `payload_of`.
        name: of its files.
        folder: for them.
        num_threads: of torch.
        script: that may define what the payload consists of; None if there is none.
    """

    payload: bytes
    name: str
    folder: Path
    num_threads: int = dataclasses.field(default_factory=torch.get_num_threads)
    script: Path | None = dataclasses.field(default_factory=lambda: _script())

    @property
    def result(self) -> Path:
        """The file of what the child has found."""
        return self.folder / f"{self.name}.pickle"

    def write(self, result: Any) -> None:
        """Write what the child has found."""
        self.result.write_bytes(pickle.dumps(result))


def is_child() -> bool:
    """Whether `run_jobs` has started this process."""
    return _IS_CHILD in os.environ


def payload_of(trainer: Trainer, arguments: Mapping[str, Any], factory: Any, task: Callable[..., Any]) -> bytes:
    """What makes a run in another process, and `task`, which gets the job, the trainer and its arguments there.

    Raises:
        NotCheckedError: if nothing can.
    """
    if factory is None:
        if is_users_class(type(trainer)):
            raise NotCheckedError(f"{type(trainer).__name__} may need other arguments than a `Trainer`: {_REMEDY}")
        given = dataclasses.asdict(dataclasses.replace(trainer.run_context.asked.given, accelerator=None))
        parts = {"model": trainer.model, "loss_func": trainer.loss_func, "optimizer": trainer.optimizer}
        parts |= {"callbacks": taking_part(trainer.callback_handler), **given}
        factory = functools.partial(_built, type(trainer), parts, arguments)
    elif isinstance(factory, str):
        factory = functools.partial(make_run, factory)
    try:
        payload = pickle.dumps((factory, task))
    except Exception as error:
        raise NotCheckedError(f"the run cannot be sent to another process ({error}): {_REMEDY}") from error
    if _MAIN in payload and _script() is None:
        raise NotCheckedError(
            'a new process would run this script: put what it does below `if __name__ == "__main__":`, or define its '
            "classes and functions in a module"
        )
    return payload


def _script() -> Path | None:
    """The script that this process runs, if another one can read it without running it: it asks for its name."""
    path = Path(getattr(sys.modules["__main__"], "__file__", None) or "")
    asks = path.is_file() and re.search(rb"^if\b.*\b__name__\b", path.read_bytes(), re.MULTILINE)
    return path.resolve() if asks else None


def _built(kind: type, parts: Mapping[str, Any], arguments: Mapping[str, Any]) -> tuple[Any, Mapping[str, Any]]:
    return kind(**parts), arguments


def work(path: str) -> None:
    """The whole life of a child, whose job is in a file."""
    job: Job = pickle.loads(Path(path).read_bytes())
    try:
        warnings.simplefilter("ignore")
        torch.set_num_threads(job.num_threads)
        if job.script is not None and _MAIN in job.payload:
            module = types.ModuleType("__mp_main__")
            vars(module).update(runpy.run_path(str(job.script), run_name="__mp_main__"))
            sys.modules["__main__"] = sys.modules["__mp_main__"] = module
        make, task = pickle.loads(job.payload)
        job.write(task(job, *make()))
    except BaseException as error:
        job.write(NotCheckedError(f"a new process failed with {type(error).__name__}: {error}"))


def trace(
    job: Job,
    trainer: Trainer,
    given: Mapping[str, Any],
    *,
    settings: Mapping[str, Any],
    last_update: int,
    num_batches: int,
    killed_in: int | None = None,
) -> list[UpdateTrace]:
    """The updates of a run that a child trains: a task for `payload_of`.

    Args:
        job: of the child.
        trainer: the trainer.
        given: its arguments of `train`.
        settings: others.
        last_update: it stops after this one.
        num_batches: of an epoch and of an evaluation, at most.
        killed_in: it saves each update in a folder of its name, and kills itself within this one; None for never.
    """
    arguments = {**given, **settings}
    trace = Trace(Outside(arguments))

    def kill(trainer: Trainer, **kwargs: Any) -> None:
        if trainer.run_state.updates + 1 == killed_in:
            job.write(trace.updates)
            os.kill(os.getpid(), getattr(signal, "SIGKILL", signal.SIGTERM))

    callbacks: list[Any] = [QuietLimit(num_batches)]
    if killed_in is not None:
        callbacks += [Saving(job.folder / job.name), on("on_train_step_end")(kill)]
    state = arguments.pop("resume_from")
    with trained_again(trainer, arguments, state, *callbacks, trace, until=last_update):
        return list(trace.updates)


def run_jobs(jobs: list[Job], variables: list[dict[str, str]], seconds: float | None = None) -> list[Any]:
    """What some children have found, each with environment variables of its own.

    Raises:
        NotCheckedError: if one has found nothing, within `seconds` if these are given.
    """
    children = [_started(job, own) for job, own in zip(jobs, variables, strict=True)]
    try:
        for child in children:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(seconds)
    finally:
        for child in children:
            child.kill()
            child.wait()
    results = [pickle.loads(job.result.read_bytes()) if job.result.exists() else None for job in jobs]
    for result in results:
        if isinstance(result, NotCheckedError):
            raise result
    for result, child in zip(results, children, strict=True):
        if result is None:
            within = "" if seconds is None else f" within {seconds:.0f} seconds"
            raise NotCheckedError(f"a new process ended with {child.returncode}{within}, without a result")
    return results


def two_ranks() -> list[dict[str, str]]:
    """The environment variables of two ranks on the CPU."""
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(get_free_port())}  # type: ignore[no-untyped-call]
    shared = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", **address}
    shared |= {"ACCELERATE_USE_CPU": "true", "CUDA_VISIBLE_DEVICES": ""}
    return [{**shared, "RANK": rank, "LOCAL_RANK": rank} for rank in ("0", "1")]


def _started(job: Job, variables: Mapping[str, str]) -> subprocess.Popen[bytes]:
    file = job.folder / f"{job.name}.job"
    file.write_bytes(pickle.dumps(job))
    return subprocess.Popen(
        [sys.executable, "-c", f"from {__name__} import work; work({str(file)!r})"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), _IS_CHILD: "1", **variables},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,  # Python and torch themselves talk about a process that is killed
    )
