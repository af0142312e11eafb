"""The worker processes of loaders: starting them, leaving signals to the trainer, and stopping all of them."""

from __future__ import annotations

import atexit
import contextlib
import enum
import functools
import itertools
import os
import traceback
import warnings
from collections.abc import Callable, Iterator
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from pytorch_accelerated.facts.seeding import mixed_seed
from pytorch_accelerated.ranks.compat.torch import end_workers, kept_pass, stop_workers, version_of
from pytorch_accelerated.ranks.signals import leave_to_trainer

# Flags and transforms are close to the dataset itself; deeper levels are data.
_MAX_DEPTH = 6
_MAX_OBJECTS = 2000
_MAX_ITEMS = 32
_PLAIN = (type(None), bool, int, float, complex, str, bytes, enum.Enum, type, torch.dtype, torch.device)


def usable_processors() -> int:
    """The number of processors that this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity is not None else os.cpu_count() or 1


class WorkerInit:
    """Runs the user's `worker_init_fn` in a worker, where ``get_worker_info().dataset`` is the user's dataset.

    Signals that ask the trainer to stop do not stop the worker.
    """

    def __init__(self, worker_init_fn: Callable[[int], None] | None, dataset: Any) -> None:
        self.worker_init_fn = worker_init_fn
        self.dataset = dataset
        self._copied: list[Any] | None = None  # the parts of the dataset

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_copied": None}

    def expect_new_workers(self, dataset: Any) -> None:
        """To be called before workers are started; `dataset` is what persistent ones will keep a copy of, or None."""
        # Passes over a stream change it, so streams are not compared.
        self._copied = (
            None if dataset is None or isinstance(dataset, IterableDataset) else list(objects_within(dataset))
        )

    def is_outdated(self, dataset: Any) -> bool:
        """Whether `dataset` was changed since the workers copied it, as far as `objects_within` it shows.

        This detects that augmentation was switched off, or a transform replaced. It does not detect in-place changes of
        arrays, or changes in the closures and globals of functions.
        """
        if self._copied is None:
            return False
        parts = list(objects_within(dataset))
        return len(parts) != len(self._copied) or not all(map(_is_same, parts, self._copied))

    def __call__(self, worker_id: int) -> None:
        info = get_worker_info()
        assert info is not None
        object.__setattr__(info, "dataset", self.dataset)  # torch's own setter refuses this
        leave_to_trainer()
        if self.worker_init_fn is not None:
            self.worker_init_fn(worker_id)


def like_loader(
    loader: DataLoader[Any], dataset: Any, *, kind: type[DataLoader[Any]] = DataLoader, **settings: Any
) -> DataLoader[Any]:
    """A loader over `dataset` with the workers and the pinning of `loader`, and a generator of its own.

    Without other `settings`, an item of `dataset` is a batch: torch's own batching would collate in the loader's
    process.
    """
    common: dict[str, Any] = {"batch_size": None, "collate_fn": _unchanged, "num_workers": loader.num_workers}
    common |= {"pin_memory": pins_memory(loader), "generator": torch.Generator()}
    if loader.num_workers > 0:
        names = ("persistent_workers", "prefetch_factor", "multiprocessing_context", "timeout")
        common |= {name: getattr(loader, name) for name in names}
        common["worker_init_fn"] = WorkerInit(loader.worker_init_fn, loader.dataset)
    with warnings.catch_warnings():
        for known_from_loader in ("This DataLoader will create", "'set_vital' is deprecated"):
            warnings.filterwarnings("ignore", message=known_from_loader)
        return kind(dataset, **{**common, **settings})


def pins_memory(loader: DataLoader[Any]) -> bool:
    """Whether `loader` asks for pinned memory and there is an accelerator; without one, torch would warn."""
    return loader.pin_memory and torch.accelerator.is_available()


def seed_workers(loader: DataLoader[Any], *parts: object) -> None:
    """Seed the generator from which torch seeds the workers."""
    assert loader.generator is not None
    loader.generator.manual_seed(mixed_seed(*parts))


def _unchanged(batch: Any) -> Any:
    return batch


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
    as a trainer and its callbacks are, its queues are closed before the workers can be told to stop.
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


def _is_same(one: Any, other: Any) -> bool:
    """Plain values count by value, other objects by identity."""
    if one is other:
        return True
    return isinstance(one, _PLAIN) and type(one) is type(other) and repr(one) == repr(other)  # NaN equals NaN


def objects_within(root: Any) -> Iterator[Any]:
    """The parts of `root`, always in the same order. The walk ends after many objects."""
    seen: set[int] = set()
    waiting: list[tuple[Any, int]] = [(root, 0)]
    while waiting and len(seen) < _MAX_OBJECTS:
        value, depth = waiting.pop()
        yield value
        if isinstance(value, _PLAIN) or id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, torch.Tensor):
            yield version_of(value)
            continue
        items: list[Any] = []
        if type(value) in (list, tuple):
            yield len(value)
            items += value[:_MAX_ITEMS]
        elif type(value) is dict:  # other mappings may read a file
            yield len(value)
            items += itertools.chain.from_iterable(itertools.islice(value.items(), _MAX_ITEMS))
        if type(getattr(value, "__dict__", None)) is dict:
            items += itertools.chain.from_iterable(vars(value).items())
        if depth < _MAX_DEPTH:
            waiting += [(item, depth + 1) for item in items]
