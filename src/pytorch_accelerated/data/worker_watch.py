"""Watches waits for the worker processes of a loader: warns of very long ones, and applies the loader's `timeout`."""

from __future__ import annotations

import mmap
import time
import warnings
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pytorch_accelerated.compat.torch import wait_as_torch_does, wait_with, workers_of
from pytorch_accelerated.errors import LoaderTimeoutError

# A first batch may take this long without a warning: workers import modules and open files.
_PATIENCE_SECONDS = 30.0
_TIMES_THE_LONGEST = 10
_POLL_SECONDS = 5.0
_MAX_SHOWN = 4
# The stages of a worker's start, in order.
NOT_STARTED, IN_WORKER_INIT, STARTED = range(3)
_STAGES = ("has not started", "is in `worker_init_fn`", "has started")
_KERNEL_STATES = {"R": "runs", "S": "sleeps", "D": "waits for a disk or the network", "T": "is stopped", "Z": "is dead"}


class WorkerWatch:
    """Watches the workers of one loader, over all its passes.

    Args:
        dataset: the user's, for messages.
        workers: the number of workers.
        are_forked: whether they share memory with this process; otherwise their stages are unknown.
    """

    def __init__(self, dataset: Any, workers: int, *, are_forked: bool) -> None:
        self._name = type(dataset).__name__
        self._stages: mmap.mmap | None = mmap.mmap(-1, workers) if are_forked else None
        self._longest = 0.0
        self._asked: float | None = None
        self._limit = 0.0

    def expect_new_workers(self) -> None:
        """Reset the stages, before workers are started."""
        if self._stages is not None:
            self._stages[:] = bytes([NOT_STARTED] * len(self._stages))

    def tell_stage(self, worker_id: int, stage: int) -> None:
        """In a worker: report its stage."""
        if self._stages is not None:
            self._stages[worker_id] = stage

    def over(self, batches: Any) -> None:
        """Watch torch's iterator `batches` from now on."""
        own = weakref.ref(batches)  # otherwise the iterator would be part of a cycle, and its workers would outlive it
        if wait_with(batches, lambda timeout: self._ask(own(), timeout)):
            self._asked = None

    def _ask(self, batches: Any, timeout: float | None) -> tuple[bool, Any]:
        """Wait for a batch like torch: for some seconds, or until the loader's `timeout`."""
        clock = time.monotonic
        asked = clock()
        if self._asked is None:
            self._asked = asked
            self._limit = max(_PATIENCE_SECONDS, _TIMES_THE_LONGEST * self._longest)
        seconds = _POLL_SECONDS if timeout is None else timeout
        while True:
            left = max(0.0, asked + seconds - clock())
            is_there, batch = wait_as_torch_does(batches, min(left, _POLL_SECONDS))
            waited = clock() - self._asked
            if is_there:
                self._longest, self._asked = max(self._longest, waited), None
                return is_there, batch
            if timeout is not None and left <= _POLL_SECONDS:
                self._asked = None
                raise LoaderTimeoutError(
                    f"No batch of the {self._name} arrived within the {timeout:g} seconds of the loader's `timeout`. "
                    f"{self._state_of(batches)}"
                )
            if waited > self._limit:
                self._limit = 2 * waited
                self._warn(batches, waited)
            if timeout is None:
                return False, None

    def _warn(self, batches: Any, waited: float) -> None:
        warnings.warn(
            f"No batch of the {self._name} has arrived for {waited:.0f} seconds; the longest wait before was "
            f"{self._longest:.1f}. {self._state_of(batches)} The run keeps waiting; with a `timeout` (in seconds) "
            "among the loader's arguments it would end with an error instead.",
            stacklevel=2,
        )

    def _state_of(self, batches: Any) -> str:
        """The state of each worker, and advice."""
        workers = workers_of(batches)
        stages = [None if self._stages is None else self._stages[index] for index in range(len(workers))]
        shown = "; ".join(map(_shown_worker, range(_MAX_SHOWN), workers, stages))
        more = f"; and {len(workers) - _MAX_SHOWN} more" if len(workers) > _MAX_SHOWN else ""
        advice = "A worker that has started, or is in `worker_init_fn`, is waiting in your code."
        if NOT_STARTED in stages:
            advice = (
                "A worker that has not started is blocked by a lock that a thread of this process held when it was "
                "forked: start the run again, with `multiprocessing_context='forkserver'` among the loader's arguments "
                "if this happens repeatedly."
            )
        return f"{shown}{more}. {advice}"


def _shown_worker(number: int, worker: Any, stage: int | None) -> str:
    if worker.exitcode is not None:
        return f"Worker {number} (process {worker.pid}) ended with exit code {worker.exitcode}"
    known = [] if stage is None else [_STAGES[stage]]
    return f"Worker {number} (process {worker.pid}) is alive, {' and '.join([*known, *_kernel_state(worker.pid)])}"


def _kernel_state(pid: int) -> Iterator[str]:
    """What a process does, according to Linux."""
    process = Path("/proc") / str(pid)
    try:
        letter = (process / "stat").read_text().rpartition(")")[2].split()[0]
        place = (process / "wchan").read_text().strip()
    except (OSError, IndexError):
        return
    if letter in _KERNEL_STATES:
        yield _KERNEL_STATES[letter] + (f" in {place}" if place not in ("", "0") else "")
