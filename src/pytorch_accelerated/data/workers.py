"""The worker processes of loaders: starting them, leaving signals to the trainer, and stopping all of them."""

from __future__ import annotations

import atexit
import contextlib
import functools
import multiprocessing
import os
import traceback
from collections.abc import Callable, Iterator
from typing import Any
from weakref import WeakKeyDictionary

from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from pytorch_accelerated.compat.torch import end_workers, kept_pass, stop_workers
from pytorch_accelerated.data.changes import Snapshot
from pytorch_accelerated.data.worker_watch import IN_WORKER_INIT, STARTED, WorkerWatch
from pytorch_accelerated.training.signals import leave_to_trainer


class WorkerInit:
    """Runs the user's `worker_init_fn` in a worker, where ``get_worker_info().dataset`` is the user's dataset.

    Signals that ask the trainer to stop do not stop the worker. `context` is the context of `multiprocessing` that
    starts the workers; None means the default.

    Attributes:
        watch: watches waits for the workers.
    """

    def __init__(self, worker_init_fn: Callable[[int], None] | None, dataset: Any, workers: int, context: Any) -> None:
        self.worker_init_fn = worker_init_fn
        self.dataset = dataset
        self.watch = WorkerWatch(dataset, workers, are_forked=_start_method(context) == "fork")
        self._copied: Snapshot | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_copied": None}

    def expect_new_workers(self, dataset: Any) -> None:
        """To be called before workers are started; `dataset` is what persistent ones will keep a copy of, or None."""
        self.watch.expect_new_workers()
        # Passes over a stream change it, so streams are not compared.
        self._copied = None if dataset is None or isinstance(dataset, IterableDataset) else Snapshot(dataset)

    def is_outdated(self, dataset: Any) -> bool:
        """Whether `dataset` was changed since the workers copied it."""
        return self._copied is not None and not self._copied.is_of(dataset)

    def __call__(self, worker_id: int) -> None:
        info = get_worker_info()
        assert info is not None
        object.__setattr__(info, "dataset", self.dataset)  # torch's own setter refuses this
        leave_to_trainer()
        self.watch.tell_stage(worker_id, IN_WORKER_INIT)
        if self.worker_init_fn is not None:
            self.worker_init_fn(worker_id)
        self.watch.tell_stage(worker_id, STARTED)


def _start_method(context: Any) -> str:
    method = (context or multiprocessing).get_start_method(allow_none=True)
    return method or multiprocessing.get_all_start_methods()[0]  # the first one is the usual one


def begin_pass(loader: DataLoader[Any]) -> Iterator[Any]:
    """Iterate over `loader`. Its workers, if any, will not outlive this process.

    Persistent workers have a copy of the dataset. If the dataset has changed since (a callback may have switched off an
    augmentation), new workers are started.
    """
    init = loader.worker_init_fn if isinstance(loader.worker_init_fn, WorkerInit) else None
    if init is not None:
        if kept_pass(loader) is not None and init.is_outdated(loader.dataset):
            end_pass(loader, kept_pass(loader))
        if kept_pass(loader) is None or not loader.persistent_workers:
            init.expect_new_workers(loader.dataset if loader.persistent_workers else None)
    batches = iter(loader)
    if init is not None:
        init.watch.over(batches)
    if loader.num_workers:
        _passes_with_workers()[batches] = os.getpid()
    return batches


@functools.cache
def _passes_with_workers() -> WeakKeyDictionary[Iterator[Any], int]:
    """Iterators with workers, and the process that created each of them. Stops the workers when the process exits.

    A process can exit within a pass if the run is in a thread. Python would then send the workers a signal, which they
    leave to the trainer, and wait for them forever.
    """
    passes: WeakKeyDictionary[Iterator[Any], int] = WeakKeyDictionary()

    def stop_all() -> None:
        with contextlib.ExitStack() as each:
            for batches, process in list(passes.items()):
                if process == os.getpid():  # otherwise this is a fork of that process
                    each.callback(stop_workers, batches)

    atexit.register(stop_all)
    return passes


def end_pass(loader: DataLoader[Any] | None, batches: Iterator[Any] | None) -> None:
    """Stop the workers of the pass `batches` over `loader`, so that the next pass starts new ones.

    Left to the garbage collector, each worker would cost five seconds: if the iterator is part of a reference cycle,
    as are those of a trainer and its callbacks, its queues are closed before the workers can be told to stop.
    """
    if loader is not None:
        end_workers(loader, batches)


@contextlib.contextmanager
def no_workers_left_on_error(loader: DataLoader[Any] | None) -> Iterator[None]:
    """Stop the workers of an iterator that fails while starting them; it can be found only in the traceback."""
    try:
        yield
    except BaseException as error:
        for frame, _ in traceback.walk_tb(error.__traceback__):
            end_pass(loader, frame.f_locals.get("self"))
        raise
