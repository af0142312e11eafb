"""New processes to measure in, and the resources of a process."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import multiprocessing
import resource
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import ParamSpec, TypeVar

import psutil
import torch

Arguments = ParamSpec("Arguments")
Returned = TypeVar("Returned")

_CONTEXT = multiprocessing.get_context("forkserver")
# Every new process imports these first, so that they are not part of the measurement. The first optimizer of a process
# would import the last one.
_CONTEXT.set_forkserver_preload(["accelerate", "pytorch_accelerated", "benchmarks.cases", "torch._dynamo"])


def in_new_process(
    function: Callable[Arguments, Returned], *args: Arguments.args, **kwargs: Arguments.kwargs
) -> Returned:
    """The return value of `function` in a new process that has only done its imports."""
    with ProcessPoolExecutor(1, mp_context=_CONTEXT, initializer=settle) as pool:
        return pool.submit(function, *args, **kwargs).result()


def settle() -> None:
    """Use one thread, and exempt loaded objects from garbage collection during measurements."""
    torch.set_num_threads(1)
    torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)  # the first optimizer imports torch's compiler
    gc.collect()
    gc.freeze()


def processor_seconds_of_ended_children() -> float:
    """What child processes have used that have ended. Those of `multiprocessing` get some seconds to do so."""
    for child in multiprocessing.active_children():
        child.join(timeout=10)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def resident_megabytes() -> float:
    """The current memory of this process."""
    return psutil.Process().memory_info().rss / 2**20


def peak_megabytes() -> float:
    """The peak memory of this process since `forget_peak`, where that is supported."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**20 if sys.platform == "darwin" else 2**10)


def forget_peak() -> None:
    """Return freed memory to the system and reset the peak to the current usage. Only Linux supports this."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")


def things_held() -> int:
    """Threads, open files and child processes of this process."""
    process = psutil.Process()
    return process.num_threads() + process.num_fds() + len(process.children(recursive=True))
