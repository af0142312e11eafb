"""Fetches batches in this process, and in workers as soon as these make the run faster."""

from __future__ import annotations

import itertools
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

from torch.utils.data import DataLoader

from pytorch_accelerated.compat.torch import leave_deaths_to_waiting, workers_of
from pytorch_accelerated.data.rows import Request, RowBatches
from pytorch_accelerated.data.worker_choice import STARTING, DatasetCheck, Pace, SlowRows, Trial
from pytorch_accelerated.data.workers import begin_pass, end_pass, no_workers_left_on_error

# Seconds that workers may be silent, and how many times as long as a batch takes here.
_PATIENCE_SECONDS = 20.0
_PATIENCE_BATCHES = 50
# Batches that torch's loader requests from each worker ahead of their use.
_PREFETCHED = 2
# Workers must reach this share of the time without them, measured over so many seconds and batches of each.
_SHARE_REACHED = 0.95
_SECONDS_OF_PROOF = 0.5
_BATCHES_OF_PROOF = 4


class MakePool(Protocol):
    """Makes the loader of `workers` processes that fetch the batches of `requests`, or raise after `timeout` seconds
    of silence."""

    def __call__(self, requests: Iterable[Request], *, workers: int, timeout: float) -> DataLoader[Any]:
        """A new loader. Each of its passes iterates over `requests`."""


class _Handout:
    """Hands requests to workers, and keeps those whose batches have not arrived. The loader keeps this object, which
    must not know the fetcher: workers in a cycle of references would not end with the last reference.

    Attributes:
        requests: of the pass.
        asked: of workers.
        is_ending: whether workers get no more of them.
    """

    def __init__(self) -> None:
        self.requests: Iterator[Request] = iter(())
        self.asked: deque[Request] = deque()
        self.is_ending = False

    def __iter__(self) -> Iterator[Request]:
        while not self.is_ending:
            request = next(self.requests, None)
            if request is None:
                return
            self.asked.append(request)
            yield request


class AutomaticFetcher:
    """Fetches the batches of a map-style dataset where it is fastest, which may change after any batch.

    What a batch holds depends on its request only, not on the process that makes it. A pass begins in this process. If
    fetching turns out to be slow, workers are started; if they gain nothing, they are stopped. A batch that workers
    don't deliver, because they raise an error, die or stay silent, is made in this process, as are all that follow.

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
        self._make = rows.maker()
        self._processors = processors
        self._make_pool = make_pool
        self._check: DatasetCheck | None = None
        self._stays = False  # in this process, whatever is measured
        self._pool: DataLoader[Any] | None = None
        self._pass: Iterator[Any] | None = None
        self._alone = 0.0  # seconds of a batch and its step without workers
        self._is_proven = False  # that workers make the run faster
        self._handout = _Handout()
        self._own: deque[Request] = deque()  # made here while workers start

    def fetch(self, requests: Iterator[Request], batches: int) -> Iterator[Any]:
        """The batches of `requests`, in order; `batches` is their number."""
        self._handout.requests, self._make = requests, self._rows.maker()
        batches_left = batches * self.passes_left
        self.passes_left = max(1, self.passes_left - 1)
        if self._pool is not None:
            self._start(0 if self._pass is not None else self._own_batches())
        elif not self._stays:
            yield from self._tried(batches_left)
        yield from self._of_workers()
        yield from map(self._make, requests)

    def close(self) -> None:
        """End worker processes. The next pass starts new ones."""
        end_pass(self._pool, self._pass)
        self._pass = None

    # ---------------------------------------------------------------------------------------------- without workers

    def _tried(self, batches_left: int) -> Iterator[Any]:
        """Batches made here, until workers have been started, or would gain nothing."""
        self._check = self._check or DatasetCheck(self._rows.dataset)
        self._rows.after_row = self._watch_of_first_rows(batches_left)
        trial = Trial()
        for done, request in enumerate(self._handout.requests, start=1):
            trial.begin()
            try:
                batch = self._make(request)
            finally:
                self._rows.after_row = None
            trial.end_fetch()
            yield batch
            trial.end_step()
            if self._pool is None and trial.is_complete:
                self._decide(trial.pace, batches_left - done)
                return
            if self._pool is not None or self._stays:
                return

    def _watch_of_first_rows(self, batches_left: int) -> Callable[[int], None]:
        """Starts workers within the first batch if its rows are very slow."""
        slow_rows: SlowRows | None = None

        def after_row(size: int) -> None:
            nonlocal slow_rows
            slow_rows = slow_rows or SlowRows(size)
            pace = slow_rows.after_row()
            if pace is not None:
                self._rows.after_row = None  # workers are copies of this process
                self._decide(pace, batches_left - 1)

        return after_row

    def _decide(self, pace: Pace, batches_left: int) -> None:
        """Start workers if they make the remaining batches faster."""
        workers = pace.best_workers(self._processors, batches_left)
        if workers == 0:
            return
        assert self._check is not None
        name = type(self._rows.dataset).__name__
        reason = self._check.reason_to_stay()
        if reason is not None:
            self._stays = True
            self.say(
                f"Fetching a batch takes {_shown(pace.fetch)}, but worker processes must not read the {name}: "
                f"{reason}. Pass `num_workers` among the loader's arguments if they may."
            )
            return
        self._alone = pace.alone
        patience = _PATIENCE_SECONDS + _PATIENCE_BATCHES * self._alone
        self._pool = self._make_pool(self._handout, workers=workers, timeout=patience)
        self.num_workers = workers
        verb = "reads" if workers == 1 else "read"
        self.say(
            f"Fetching a batch takes {_shown(pace.fetch)}, so {_processes(workers)} {verb} the {name} from now on."
        )
        self._start(self._own_batches())

    # ------------------------------------------------------------------------------------------------- with workers

    def _own_batches(self) -> int:
        """The number of batches that can be made here while workers start."""
        return int(STARTING / self._alone) + 1

    def _start(self, own: int) -> None:
        """Start a pass of the workers, after the next `own` requests."""
        assert self._pool is not None
        self._own = deque(itertools.islice(self._handout.requests, own))
        self._handout.asked.clear()
        self._handout.is_ending = False
        try:
            with warnings.catch_warnings():
                # More workers than processors are right for rows that wait for a disk.
                warnings.filterwarnings("ignore", message="This DataLoader will create")
                with no_workers_left_on_error(self._pool):
                    self._pass = begin_pass(self._pool)
            leave_deaths_to_waiting(self._pass)
        except (OSError, RuntimeError) as error:  # no more processes, no memory for one, or one has died at once
            self._leave_workers(f"they can't be started ({_last_line(error)})")

    def _of_workers(self) -> Iterator[Any]:
        """The batches made here while workers start, and those of the workers, until there are no more or the workers
        are stopped. All batches requested from them have then been made."""
        while self._own:
            yield self._make(self._own.popleft())
        received, since = 0, 0.0
        while self._pass is not None:
            try:
                batch = next(self._pass)
            except StopIteration:
                break
            except Exception as error:
                for worker in workers_of(self._pass):
                    worker.kill()  # one that hangs would be waited for
                end_pass(self._pool, self._pass)
                failed = self._handout.asked.popleft()
                yield self._make(failed)  # raises the dataset's own error if one of its rows is to blame
                self._leave_workers(f"they fail ({type(error).__name__}: {_last_line(error)})")
                break
            self._handout.asked.popleft()
            if self._handout.is_ending and not self._handout.asked:
                self._leave_workers(None)
            yield batch
            if not self._is_proven:
                received += 1
                ahead = _PREFETCHED * self.num_workers  # made while the workers started and the last own batches
                if received == ahead:
                    since = time.perf_counter()
                elif received > ahead:
                    self._judge(received - ahead, time.perf_counter() - since)
        while self._handout.asked:
            yield self._make(self._handout.asked.popleft())

    def _judge(self, batches: int, seconds: float) -> None:
        """Stop workers that gain nothing."""
        if seconds < _SECONDS_OF_PROOF or batches < _BATCHES_OF_PROOF * self.num_workers:
            return
        self._is_proven = True
        if seconds / batches > _SHARE_REACHED * self._alone:
            self._handout.is_ending = True
            self.say(
                f"A batch takes {_shown(seconds / batches)} with {_processes(self.num_workers)}, and "
                f"{_shown(self._alone)} without: this process reads the {type(self._rows.dataset).__name__} again."
            )

    def _leave_workers(self, reason: str | None) -> None:
        """Stop the workers for good."""
        end_pass(self._pool, self._pass)
        self._pool = self._pass = None
        self.num_workers = 0
        self._stays = True
        if reason is not None:
            name = type(self._rows.dataset).__name__
            self.say(f"Worker processes don't read the {name}, since {reason}: this process reads it from now on.")


def _processes(number: int) -> str:
    return f"{number} worker process{'' if number == 1 else 'es'}"


def _shown(seconds: float) -> str:
    return f"{1000 * seconds:.2g} ms" if seconds < 0.1 else f"{seconds:.2g} s"


def _last_line(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[-1].strip() if lines else "no message"
