"""How many worker processes make a run faster, and whether its dataset can be read by them."""

from __future__ import annotations

import math
import os
import random
import time
import types
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from pytorch_accelerated.data.changes import Snapshot, objects_within

MAX_WORKERS = 8
# Of one batch, in seconds: what this process spends on receiving it, and a worker on sending it.
_RECEIVING = 0.0002
_SENDING = 0.0002
# Of workers, in seconds: until the first batch arrives, and what this process spends on forking each.
STARTING = 0.1
_FORKING = 0.03
# What fetching a batch must take at least, in seconds without those in which other programs had the processor.
_WORTH_A_WORKER = 0.0005
# Workers must save this share of a batch's time, and one more worker this share of what is left.
_SHARE_WORTH_WORKERS = 0.1
_SHARE_WORTH_A_WORKER = 0.03
# When enough batches have been measured to decide.
_MIN_BATCHES = 3
_MAX_BATCHES = 16
_SECONDS_OF_FETCHING = 0.02


class AutomaticWorkers(int):
    """The number of workers among a loader's arguments, 0, if the user has not chosen one: workers may start later.

    Args:
        processors: that this rank may use.
    """

    processors: int

    def __new__(cls, processors: int) -> AutomaticWorkers:
        """The number 0."""
        number = super().__new__(cls, 0)
        number.processors = processors
        return number

    def __reduce__(self) -> Any:
        """For copies, which keep the number of processors."""
        return AutomaticWorkers, (self.processors,)


def usable_processors() -> int:
    """The number of processors that this process may use: those it is bound to, and the quota of its container."""
    affinity = getattr(os, "sched_getaffinity", None)
    bound = len(affinity(0)) if affinity is not None else os.cpu_count() or 1
    return max(1, min(bound, _quota(Path("/sys/fs/cgroup"))))


def _quota(cgroup: Path) -> int:
    """The processors that Linux grants this process per unit of time, in either version of its control groups."""
    try:
        if (cgroup / "cpu.max").exists():
            granted, period = (cgroup / "cpu.max").read_text().split()
        else:
            granted = (cgroup / "cpu/cpu.cfs_quota_us").read_text()
            period = (cgroup / "cpu/cpu.cfs_period_us").read_text()
        return math.ceil(int(granted) / int(period)) if int(granted) > 0 else MAX_WORKERS**2
    except (OSError, ValueError):  # "max": no limit
        return MAX_WORKERS**2


class Pace(NamedTuple):
    """What one batch takes without workers, in seconds.

    Attributes:
        fetch: for fetching it.
        fetch_cpu: processor time of that.
        step: from its fetching until the next batch is requested.
        step_cpu: processor time of that, of all threads.
        share: of a processor, that a thread of this process got when it could run: less than 1 if others run, too.
    """

    fetch: float
    fetch_cpu: float
    step: float
    step_cpu: float
    share: float = 1.0

    @property
    def alone(self) -> float:
        """The seconds of one batch without workers."""
        return self.fetch + self.step

    def with_workers(self, workers: int, processors: int) -> float:
        """The expected seconds of one batch: the slowest of this process, the workers, and all processors together."""
        work = self.step_cpu + self.fetch_cpu + _RECEIVING + _SENDING
        return max(self.step + _RECEIVING, (self.fetch + _SENDING) / workers, work / (processors * self.share))

    def best_workers(self, processors: int, batches_left: int) -> int:
        """The number of workers that is worth starting for the rest of a run; 0 if none is."""
        best, seconds = 0, self.alone
        waiting = max(0.0, self.fetch - self.fetch_cpu / self.share)
        if self.fetch_cpu + waiting < _WORTH_A_WORKER:
            return 0
        for workers in range(1, MAX_WORKERS + 1):
            expected = self.with_workers(workers, processors)
            if expected < (1 - (_SHARE_WORTH_A_WORKER if best else _SHARE_WORTH_WORKERS)) * seconds:
                best, seconds = workers, expected
        return best if (self.alone - seconds) * batches_left > STARTING + _FORKING * best else 0


class _Share:
    """Measures the share of a processor that this thread gets, from its construction on."""

    def __init__(self) -> None:
        self._before = self._read()

    @staticmethod
    def _read() -> tuple[int, int]:
        """The nanoseconds that this thread has run, and waited for a processor, according to Linux."""
        try:
            ran, waited, _ = Path("/proc/thread-self/schedstat").read_text().split()
            return int(ran), int(waited)
        except (OSError, ValueError):
            return 0, 0

    def now(self) -> float:
        """The share; 1 if unknown."""
        ran, waited = (now - before for now, before in zip(self._read(), self._before, strict=True))
        return ran / (ran + waited) if ran > 0 else 1.0


class Trial:
    """Measures batches that are fetched in this process, until it is known what each takes."""

    def __init__(self) -> None:
        self._fetches: list[tuple[float, float]] = []
        self._steps: list[tuple[float, float]] = []
        self._share = _Share()
        self._began = self._now()

    @staticmethod
    def _now() -> tuple[float, float]:
        return time.perf_counter(), time.process_time()

    def begin(self) -> None:
        """A fetch or a step begins."""
        self._began = self._now()

    def end_fetch(self) -> None:
        """A fetch has ended, and a step begins."""
        self._end(self._fetches)

    def end_step(self) -> None:
        """A step has ended, and a fetch begins."""
        self._end(self._steps)

    def _end(self, measured: list[tuple[float, float]]) -> None:
        began, self._began = self._began, self._now()
        measured.append((self._began[0] - began[0], self._began[1] - began[1]))

    @property
    def is_complete(self) -> bool:
        """Whether enough is known."""
        batches = len(self._steps)
        fetching = sum(seconds for seconds, _ in self._fetches)
        return batches >= _MAX_BATCHES or (batches >= _MIN_BATCHES and fetching > _SECONDS_OF_FETCHING)

    @property
    def pace(self) -> Pace:
        """What a batch takes. The first one, which may open files or compile, counts only if there are few."""
        fetch, fetch_cpu = np.median(self._fetches[1:], axis=0).tolist()
        step, step_cpu = np.median(self._steps[1:], axis=0).tolist()
        return Pace(fetch, fetch_cpu, step, step_cpu, self._share.now())


class SlowRows:
    """Finds out within the first batch that its rows are so slow that workers should start at once.

    Args:
        size: rows of the batch.
    """

    _MIN_ROWS = 3
    _SECONDS = 0.05
    # A batch must take this long; no step is known yet that it could be compared with.
    _SECONDS_OF_A_BATCH = 0.1

    def __init__(self, size: int) -> None:
        self._size = size
        self._began = self._last = time.perf_counter()
        self._cpu = time.process_time()
        self._share = _Share()
        self._rows = 0
        self._slowest = 0.0

    def after_row(self) -> Pace | None:
        """What a batch takes, if its rows are slow."""
        now = time.perf_counter()
        self._rows += 1
        self._slowest = max(self._slowest, now - self._last)
        self._last = now
        if self._rows < self._MIN_ROWS or now - self._began < self._SECONDS:
            return None
        # Without the slowest row, which may have opened files.
        fetch = (now - self._began - self._slowest) / (self._rows - 1) * self._size
        busy = min(1.0, (time.process_time() - self._cpu) / (now - self._began))
        return Pace(fetch, busy * fetch, 0.0, 0.0, self._share.now()) if fetch > self._SECONDS_OF_A_BATCH else None


class DatasetCheck:
    """Whether workers may read `dataset`. To be made before the dataset is read in this process."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self._before = Snapshot(dataset)

    def reason_to_stay(self) -> str | None:
        """Why workers must not read the dataset; None if they may.

        Workers are copies of this process. Files, connections and the like would be shared by all of them. A generator
        or counter of the dataset's own would make rows depend on which process reads them.
        """
        for part in objects_within(self._dataset):
            if isinstance(part, (random.Random, np.random.Generator, np.random.RandomState, torch.Generator)):
                return f"it has a random generator of its own ({type(part).__name__})"
            if not _can_be_copied(part):
                return f"it holds a {type(part).__name__}, which processes cannot share"
        return None if self._before.is_of(self._dataset) else "reading rows changes it"


_SHARED_FREELY = (
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodType,
    types.ModuleType,
    type,
    torch.Tensor,
    np.ndarray,
    np.dtype,
    torch.dtype,
    torch.device,
)


def _can_be_copied(part: Any) -> bool:
    """Whether an object is no resource of the system: those refuse to be pickled."""
    if isinstance(part, _SHARED_FREELY):
        return True
    try:
        part.__reduce_ex__(2)
    except TypeError:
        return False
    except Exception:  # of a class that has more to say about it
        return True
    return True
