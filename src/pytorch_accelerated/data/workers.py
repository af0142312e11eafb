"""The worker processes of loaders: how they begin, what they leave to the trainer, and that none is left behind."""

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
from pytorch_accelerated.data.worker_watch import BEGUN, IN_WORKER_INIT, WorkerWatch
from pytorch_accelerated.training.signals import leave_to_trainer


class WorkerInit:
    """Runs the user's `worker_init_fn` in a worker, where ``get_worker_info().dataset`` is the user's dataset.

    Signals that ask the trainer to end do not end the worker.

    Args:
        worker_init_fn: the user's.
        dataset: the user's.
        workers: how many there are.
        context: of `multiprocessing` that starts them; None for the usual one.

    Attributes:
        watch: of waits for the workers.
    """

    def __init__(self, worker_init_fn: Callable[[int], None] | None, dataset: Any, workers: int, context: Any) -> None:
        self.worker_init_fn = worker_init_fn
        self.dataset = dataset
        self.watch = WorkerWatch(dataset, workers, are_forked=_start_method(context) == "fork")
        self._copied: Snapshot | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_copied": None}

    def expect_new_workers(self, dataset: Any) -> None:
        """Before workers are started that will keep `dataset`, if it is given, as it is now."""
        self.watch.expect_new_workers()
        # The passes of a stream change it.
        self._copied = None if dataset is None or isinstance(dataset, IterableDataset) else Snapshot(dataset)

    def is_outdated(self, dataset: Any) -> bool:
        """Whether `dataset` is no longer what the workers keep."""
        return self._copied is not None and not self._copied.is_of(dataset)

    def __call__(self, worker_id: int) -> None:
        info = get_worker_info()
        assert info is not None
        object.__setattr__(info, "dataset", self.dataset)  # torch's own setter refuses
        leave_to_trainer()
        self.watch.tell_stage(worker_id, IN_WORKER_INIT)
        if self.worker_init_fn is not None:
            self.worker_init_fn(worker_id)
        self.watch.tell_stage(worker_id, BEGUN)


def _start_method(context: Any) -> str:
    method = (context or multiprocessing).get_start_method(allow_none=True)
    return method or multiprocessing.get_all_start_methods()[0]  # the first one is the usual one


def begin_pass(loader: DataLoader[Any]) -> Iterator[Any]:
    """The batches of `loader`, maybe from workers, which do not outlive this process.

    Workers that persist have a copy of the dataset. If that was changed since, by a callback that switches off an
    augmentation for instance, new ones are started.
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
    """Passes, and the processes that began them, which end their workers if they end in the middle of a pass.

    That can be where a run is in a thread. Python would only ask the workers to end, by a signal that they leave to
    the trainer, and wait for them for ever.
    """
    passes: WeakKeyDictionary[Iterator[Any], int] = WeakKeyDictionary()

    def stop_all() -> None:
        with contextlib.ExitStack() as each:
            for batches, process in list(passes.items()):
                if process == os.getpid():  # else this is a fork of it
                    each.callback(stop_workers, batches)

    atexit.register(stop_all)
    return passes


def end_pass(loader: DataLoader[Any] | None, batches: Iterator[Any] | None) -> None:
    """End the workers of the pass `batches` over `loader`, so that the next pass starts new ones.

    Left to the garbage collector, they cost five seconds each: if the iterator is part of a reference cycle, as those
    of a trainer and its callbacks are, its queues are closed before the word to end could be sent through them.
    """
    if loader is not None:
        end_workers(loader, batches)


@contextlib.contextmanager
def no_workers_left_on_error(loader: DataLoader[Any] | None) -> Iterator[None]:
    """End the workers of an iterator that fails while it starts them: only its traceback knows it then."""
    try:
        yield
    except BaseException as error:
        for frame, _ in traceback.walk_tb(error.__traceback__):
            end_pass(loader, frame.f_locals.get("self"))
        raise
