"""Waits for the worker processes of a loader: one that is far too long says so, or ends with the loader's `timeout`."""

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

# A first batch may take this long without a word: workers import modules and open files.
_PATIENCE_SECONDS = 30.0
_TIMES_THE_LONGEST = 10
_POLL_SECONDS = 5.0
_MAX_SHOWN = 4
# What a worker has told about itself, each one after the other.
NOT_BEGUN, IN_WORKER_INIT, BEGUN = range(3)
_STAGES = ("has not begun", "is in `worker_init_fn`", "has begun")
_KERNEL_STATES = {"R": "runs", "S": "sleeps", "D": "waits for a disk or the network", "T": "is stopped", "Z": "is dead"}


class WorkerWatch:
    """Knows what to expect of the workers of one loader, over all its passes.

    Args:
        dataset: the user's, for messages.
        workers: how many there are.
        are_forked: whether they share memory with this process; of others nobody knows how far they are.
    """

    def __init__(self, dataset: Any, workers: int, *, are_forked: bool) -> None:
        self._name = type(dataset).__name__
        self._stages: mmap.mmap | None = mmap.mmap(-1, workers) if are_forked else None
        self._longest = 0.0
        self._asked: float | None = None
        self._limit = 0.0

    def expect_new_workers(self) -> None:
        """Before they are started."""
        if self._stages is not None:
            self._stages[:] = bytes([NOT_BEGUN] * len(self._stages))

    def tell_stage(self, worker_id: int, stage: int) -> None:
        """In a worker: say how far it is."""
        if self._stages is not None:
            self._stages[worker_id] = stage

    def over(self, batches: Any) -> None:
        """Watch the pass `batches` of torch's, from now on."""
        own = weakref.ref(batches)  # else the pass would be part of a cycle, and its workers outlive it
        if wait_with(batches, lambda timeout: self._ask(own(), timeout)):
            self._asked = None

    def _ask(self, batches: Any, timeout: float | None) -> tuple[bool, Any]:
        """Wait for a batch, as torch does: for some seconds, or until the loader's `timeout`."""
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
                    f"No batch of the {self._name} has come within the {timeout:g} seconds that the loader's `timeout` "
                    f"allows. {self._state_of(batches)}"
                )
            if waited > self._limit:
                self._limit = 2 * waited
                self._warn(batches, waited)
            if timeout is None:
                return False, None

    def _warn(self, batches: Any, waited: float) -> None:
        warnings.warn(
            f"No batch of the {self._name} has come for {waited:.0f} seconds, where the longest wait before was "
            f"{self._longest:.1f}. {self._state_of(batches)} The run keeps waiting; with a `timeout` (in seconds) "
            "among the loader's arguments it ends with an error instead.",
            stacklevel=2,
        )

    def _state_of(self, batches: Any) -> str:
        """What is known of each worker, and what to do about it."""
        workers = workers_of(batches)
        stages = [None if self._stages is None else self._stages[index] for index in range(len(workers))]
        shown = "; ".join(map(_shown_worker, range(_MAX_SHOWN), workers, stages))
        more = f"; and {len(workers) - _MAX_SHOWN} more" if len(workers) > _MAX_SHOWN else ""
        advice = "A worker that has begun, or is in `worker_init_fn`, waits in code of yours."
        if NOT_BEGUN in stages:
            advice = (
                "A worker that has not begun was stopped by a lock that a thread of this process held when it was "
                "forked: start the run again, with `multiprocessing_context='forkserver'` among the loader's arguments "
                "if that happens more often."
            )
        return f"{shown}{more}. {advice}"


def _shown_worker(number: int, worker: Any, stage: int | None) -> str:
    if worker.exitcode is not None:
        return f"Worker {number} (process {worker.pid}) has ended with exit code {worker.exitcode}"
    known = [] if stage is None else [_STAGES[stage]]
    return f"Worker {number} (process {worker.pid}) is alive, {' and '.join([*known, *_kernel_state(worker.pid)])}"


def _kernel_state(pid: int) -> Iterator[str]:
    """What Linux says that a process does."""
    process = Path("/proc") / str(pid)
    try:
        letter = (process / "stat").read_text().rpartition(")")[2].split()[0]
        place = (process / "wchan").read_text().strip()
    except (OSError, IndexError):
        return
    if letter in _KERNEL_STATES:
        yield _KERNEL_STATES[letter] + (f" in {place}" if place not in ("", "0") else "")
