"""Fetches batches in this process, and in workers from the moment when these have turned out to be worth it."""

from __future__ import annotations

import multiprocessing
import os
import random
import statistics
import time
import types
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from pytorch_accelerated.data.rows import Request, RowBatches
from pytorch_accelerated.data.workers import begin_pass, end_pass, no_workers_left_on_error, objects_within
from pytorch_accelerated.facts.seeding import without_second_numbers

_MAX_WORKERS = 8
# Batches that are measured, besides the first one, which may open files.
_MEASURED = 4
# Seconds: what fetching a batch must take at least, what sending it takes, and until workers deliver their first one.
_WORTH_A_WORKER, _TRANSFER, _STARTING = 0.0005, 0.0002, 0.2
# Workers must save this share of a batch's time, or are given up after so many batches of each.
_SHARE_SAVED, _BATCHES_OF_PROOF = 0.1, 10
# Seconds that workers may be silent.
_PATIENCE = 60.0


class AutomaticLoader(DataLoader[Any]):
    """A torch `DataLoader` for whose workers the user has given no number, so that the run may start some."""


def usable_processors() -> int:
    """The number of processors that this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity is not None else os.cpu_count() or 1


# Makes the loader of a number of worker processes, whose passes iterate over requests: ``make(requests, workers=2)``.
MakePool = Callable[..., DataLoader[Any]]


class _Handout:
    """Hands requests to workers, and keeps those whose batches have not arrived. The loader keeps this object, which
    must not know the fetcher: workers in a cycle of references would not end with the last reference."""

    def __init__(self) -> None:
        self.requests: Iterator[Request] = iter(())
        self.asked: deque[Request] = deque()

    def __iter__(self) -> Iterator[Request]:
        for request in self.requests:
            self.asked.append(request)
            yield request


class AutomaticFetcher:
    """Fetches the batches of a map-style dataset in this process, and then in workers if that is faster.

    What a batch holds depends on its request only, not on the process that makes it. The first batches of the first
    pass are measured here. Workers are started then or never. If they don't gain anything, or don't deliver a batch,
    because they raise an error, die or stay silent, that batch is made here, as are all that follow.

    Args:
        rows: makes the batches.
        processors: that this rank may use.
        make_pool: makes the loader of a number of workers.

    Attributes:
        num_workers: the current number of workers.
        passes_left: how often the data will still be read.
        say: tells the user.
    """

    def __init__(self, rows: RowBatches, processors: int, make_pool: MakePool) -> None:
        self.num_workers = 0
        self.passes_left = 1
        self.say: Callable[[str], None] = print
        self._rows = rows
        self._name = type(rows.dataset).__name__
        self._processors = processors
        self._make_pool = make_pool
        self._times: list[tuple[float, float]] = []  # of a batch: seconds for fetching it, and until the next one
        self._alone = 0.0  # seconds of a batch without workers
        self._is_judged = False
        self._handout = _Handout()
        self._pool: DataLoader[Any] | None = None
        self._pass: Iterator[Any] | None = None

    def fetch(self, requests: Iterator[Request], batches: int) -> Iterator[Any]:
        """The batches of `requests`, in order; `batches` is their number."""
        make, batches_left = self._rows.maker(), batches * self.passes_left
        self.passes_left = max(1, self.passes_left - 1)
        if len(self._times) <= _MEASURED and _is_forking():
            yield from self._measured(make, requests, batches_left)
        if self._pool is not None:
            yield from without_second_numbers(self._of_workers(self._pool, make, requests))
        yield from map(make, requests)

    def close(self) -> None:
        """End worker processes. The next pass starts new ones."""
        end_pass(self._pool, self._pass)
        self._pass = None

    def _measured(
        self, make: Callable[[Request], Any], requests: Iterator[Request], batches_left: int
    ) -> Iterator[Any]:
        """Batches made here, until enough of them have been measured."""
        for done, request in enumerate(requests, start=1):
            began = time.perf_counter()
            batch = make(request)
            fetched = time.perf_counter()
            yield batch
            self._times.append((fetched - began, time.perf_counter() - fetched))
            if len(self._times) > _MEASURED:
                self._decide(batches_left - done)
                return

    def _decide(self, batches_left: int) -> None:
        """Make a pool of workers if they make the remaining batches faster."""
        fetch, step = map(statistics.median_low, zip(*self._times[1:], strict=True))
        self._alone = fetch + step
        if fetch < _WORTH_A_WORKER or self._processors == 1:
            return
        # As many as it takes to be as fast as the step, if there are processors for them.
        workers = min(_MAX_WORKERS, self._processors, int(fetch / (step + _TRANSFER)) + 1)
        saved = self._alone - max(step + _TRANSFER, (fetch + _TRANSFER) / workers)
        if saved < _SHARE_SAVED * self._alone or saved * batches_left < _STARTING:
            return
        if not can_be_shared(self._rows.dataset):
            return
        self._pool = self._make_pool(self._handout, workers=workers, timeout=_PATIENCE + 20 * self._alone)
        self.num_workers = workers
        self.say(
            f"Fetching a batch takes {1000 * fetch:,.1f} ms, so the {self._name} is read by worker processes from now "
            f"on ({workers})."
        )

    def _of_workers(
        self, pool: DataLoader[Any], make: Callable[[Request], Any], requests: Iterator[Request]
    ) -> Iterator[Any]:
        """The batches of workers; if these are given up, those that they were asked for come from this process."""
        self._handout.requests, asked = requests, self._handout.asked
        asked.clear()
        self._pass = None
        received, since = 0, 0.0
        while self._pool is not None:
            try:
                if self._pass is None:
                    with no_workers_left_on_error(pool):
                        self._pass = begin_pass(pool)
                batch = next(self._pass)
            except StopIteration:
                return
            except Exception as error:
                end_pass(pool, self._pass)
                batch = make(asked[0]) if asked else None  # raises the dataset's own error if it is to blame
                self._leave_workers(f"they fail ({type(error).__name__}: {error})")
                if not asked:
                    return
            asked.popleft()
            yield batch
            received += 1
            if received == 2 * self.num_workers:  # what is made while they start proves nothing
                since = time.perf_counter()
            if received == _BATCHES_OF_PROOF * self.num_workers and not self._is_judged:
                self._is_judged = True
                seconds = (time.perf_counter() - since) / (received - 2 * self.num_workers)
                if seconds > self._alone:
                    times = f"{1000 * seconds:.2g} ms with them, and {1000 * self._alone:.2g} without"
                    self._leave_workers(f"a batch takes {times}")
        yield from map(make, asked)

    def _leave_workers(self, reason: str) -> None:
        """Give up the workers for good."""
        end_pass(self._pool, self._pass)
        self._pool = self._pass = None
        self.num_workers = 0
        self.say(f"Worker processes don't read the {self._name}, since {reason}: this process reads it from now on.")


def _is_forking() -> bool:
    """Whether processes that torch starts are forked from this one, which may have children.

    Others would import the user's script again, although nobody has asked for processes, and need many seconds.
    """
    # Without `allow_none`, the question would fix the method. The first one is the default.
    method = multiprocessing.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0]
    return method == "fork" and not multiprocessing.current_process().daemon


def can_be_shared(dataset: Any) -> bool:
    """Whether forked processes may read `dataset`.

    Files, connections and the like would be shared by all of them, with one position. A generator that the dataset
    keeps would draw the same numbers in each.
    """
    for part in objects_within(dataset):
        if isinstance(part, (random.Random, np.random.Generator, np.random.RandomState, torch.Generator)):
            return False
        if isinstance(part, (torch.Tensor, np.ndarray, type, types.FunctionType, types.ModuleType)):
            continue
        try:
            part.__reduce_ex__(2)  # resources of the system refuse this
        except TypeError:
            return False
        except Exception:  # of a class that has more to say about it
            continue
    return True
