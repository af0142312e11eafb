"""Makes a `RunLoader` from anything that yields batches: this rank's part of it, which has batches in a known order."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler

from pytorch_accelerated.data.ordering import drawn_seed
from pytorch_accelerated.data.planned_loader import PlannedLoader
from pytorch_accelerated.data.stream_loader import StreamLoader
from pytorch_accelerated.data.streams import divides_itself, is_stateful_loader
from pytorch_accelerated.data.updates import DeviceFeed, RunLoader
from pytorch_accelerated.errors import ArgumentTypeError, ConfigurationError, DataError
from pytorch_accelerated.facts.trees import leaves
from pytorch_accelerated.ranks.accelerators import send_to_device
from pytorch_accelerated.ranks.compat.accelerate import given_loader
from pytorch_accelerated.ranks.ranks import Ranks


def distribute_loader(
    loader: Any,
    ranks: Ranks,
    *,
    seed: int,
    saved_seed: int | None,
    accumulation_steps: int,
    is_sharded: bool,
) -> RunLoader:
    """This rank's part of the user's `loader`. Must be called by all ranks.

    Args:
        loader: yields batches.
        ranks: the processes.
        seed: of the order of the rows, if the loader has no seed of its own.
        saved_seed: the seed in a resumed run, whatever generators are like now.
        accumulation_steps: batches of an update.
        is_sharded: whether the loader already yields only this rank's rows.
    """
    if isinstance(loader, RunLoader):
        return loader
    loader = given_loader(loader)
    own_seed = ranks.from_first(drawn_seed(loader))  # on every rank, so that generators stay in step
    seed = next(each for each in (saved_seed, own_seed, seed) if each is not None)
    feed = device_feed(ranks.device, send_to_device)
    adapted = adapt_loader(
        loader, ranks, seed=seed, accumulation_steps=accumulation_steps, feed=feed, is_sharded=is_sharded
    )
    refuse_other_rows(adapted, ranks)
    return adapted


def adapt_loader(
    loader: Any, ranks: Ranks, *, seed: int, accumulation_steps: int, feed: DeviceFeed, is_sharded: bool = False
) -> RunLoader:
    """A `RunLoader` for a torch `DataLoader` or another iterable of batches.

    `is_sharded` says that the data already gives each rank different samples, which is known of litdata, Ray Data,
    MosaicML's streaming, and what `split_dataset_by_node` of `datasets` returns. For other arguments see `RunLoader`.

    Raises:
        ArgumentTypeError: if `loader` cannot be iterated over.
        ConfigurationError: for a stream that is divided for another number of ranks.
    """
    if not isinstance(loader, Iterable) and not hasattr(loader, "__getitem__"):
        raise ArgumentTypeError(
            f"A {type(loader).__name__} is no loader. Return a DataLoader or another iterable of batches."
        )
    sources = (loader, getattr(loader, "dataset", None))
    is_sharded = is_sharded or any(divides_itself(source, ranks.count) for source in sources)
    settings: dict[str, Any] = {"seed": seed, "accumulation_steps": accumulation_steps, "feed": feed}
    is_torch_loader = isinstance(loader, DataLoader) and (
        type(loader).__iter__ is DataLoader.__iter__ or is_stateful_loader(loader)
    )
    is_stream = is_torch_loader and isinstance(loader.dataset, IterableDataset)
    if is_torch_loader and not is_stream and loader.batch_sampler is not None:
        return PlannedLoader(loader, ranks, **settings)
    if ranks.count > 1 and not is_stream and not is_sharded and ranks.is_first:
        warnings.warn(
            f"The {type(loader).__name__} is used as it is on each of the {ranks.count} ranks. If it yields different "
            "batches on each, pass `is_sharded=True` among the loader's arguments; if not, a dataset or a DataLoader.",
            stacklevel=2,
        )
    return StreamLoader(loader, ranks, is_sharded=is_sharded, **settings)


def close_loader(loader: Any) -> None:
    """End the worker processes of `loader`, if it is one of a run."""
    if isinstance(loader, RunLoader):
        loader.close()


def refuse_empty(loader: RunLoader, purpose: str) -> None:
    """Refuse a loader that is known to have no batches, with a `DataError` that there is nothing to `purpose`."""
    if loader.num_batches == 0:
        raise empty_loader_error(loader, purpose)


def empty_loader_error(loader: Any, purpose: str) -> DataError:
    """The error for a loader that yields no batches."""
    dataset = getattr(loader, "dataset", None)
    name = type(loader.source if isinstance(loader, RunLoader) else loader).__name__
    of_dataset = "" if dataset is None else f" of the {type(dataset).__name__}"
    names = {"num_samples": "samples", "batch_size": "batch size", "drop_last": "drop_last"}
    facts = {word: getattr(loader, name, None) for name, word in names.items()}
    shown = ", ".join(f"{word}: {value}" for word, value in facts.items() if value is not None)
    return DataError(
        f"There is nothing to {purpose}: the {name}{of_dataset} yields no batches{f' ({shown})' if shown else ''}. "
        "Check the length of the data, the batch size and `drop_last`."
    )


def refuse_rearranged(loader: RunLoader) -> None:
    """Refuse predictions with a loader that shuffles or leaves samples out: rows could not be matched with samples."""
    if loader.is_shuffled or loader.drop_last:
        raise ConfigurationError(
            "Predictions come in the order of the dataset, one for each sample, but the loader "
            f"{'shuffles' if loader.is_shuffled else 'has drop_last=True'}. Pass another one, or the dataset itself."
        )


def refuse_other_order(loader: Any) -> None:
    """Refuse to train on the first batches of a torch loader that does not read its dataset from the beginning.

    The order of a stream, and of a loader of another kind, is its own affair.

    Raises:
        ConfigurationError: names the sampler.
    """
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return
    samplers = (loader.sampler, loader.batch_sampler)
    others = [each for each in samplers if type(each) not in (SequentialSampler, BatchSampler, type(None))]
    if others:
        raise ConfigurationError(
            f"`overfit_batches` takes the first batches of the dataset, but a {type(others[0]).__name__} may choose "
            "others in every epoch. Pass the dataset itself, or a loader with `shuffle=False`."
        )


def refuse_other_rows(loader: RunLoader, ranks: Ranks) -> None:
    """Refuse a loader whose rows are not the same on every rank. Must be called by all ranks.

    Raises:
        DataError: says how they differ.
    """
    if ranks.count == 1:
        return  # without a comparison, no rows need to be fetched for fingerprints
    everyones = ranks.exchange(loader.fingerprint)
    difference = next(filter(None, map(everyones[0].difference, everyones)), None)
    if difference is None:
        return
    lengths = [theirs.rows for theirs in everyones]
    raise DataError(
        f"The ranks have different datasets ({type(loader.dataset).__name__}; lengths by rank: {lengths}; some rank "
        f"has {difference}), so samples would be used twice or never. If they were split at random, call "
        "`set_seed(...)` before the split; if they were listed from a folder, sort the list."
    )


# -------------------------------------------------------------------------------------------------------- to the device


# An H100 copies this much in 140 µs; keeping two streams apart costs its host about 200.
_LARGE_BATCH = 8 * 2**20


def device_feed(device: torch.device, move: Callable[..., Any]) -> DeviceFeed:
    """The `DeviceFeed` for `device`, where ``move(batch, device, non_blocking=True)`` returns the batch on the device.

    On the CPU it does nothing. On CUDA a large batch is copied on a separate stream while the one before is in use.
    Small batches, and those for other devices, are copied when they are requested.
    """
    if device.type == "cpu":
        return _unchanged
    if device.type == "cuda":
        return _CudaFeed(device, move)
    return lambda batches: (move(batch, device, non_blocking=True) for batch in batches)


def _unchanged(batches: Iterator[Any]) -> Iterator[Any]:
    return batches


class _CudaFeed:
    """Copies one batch ahead, on its own stream if it is large."""

    def __init__(self, device: torch.device, move: Callable[..., Any]) -> None:
        self._device = device
        self._move = move
        self._stream: torch.cuda.Stream | None = None

    def __call__(self, batches: Iterator[Any]) -> Iterator[Any]:
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        ahead = self._copy_next(batches, self._stream)
        while ahead is not None:
            batch, copied = ahead
            if copied is not None:
                current = torch.cuda.current_stream(self._device)
                current.wait_event(copied)  # the stream waits, the host does not
                for tensor in _tensors_in(batch) or ():
                    # The other stream owns the memory and must not reuse it before this stream has finished with it.
                    tensor.record_stream(current)
            ahead = self._copy_next(batches, self._stream)
            yield batch

    def _copy_next(
        self, batches: Iterator[Any], stream: torch.cuda.Stream
    ) -> tuple[Any, torch.cuda.Event | None] | None:
        for batch in batches:
            tensors = _tensors_in(batch)
            if tensors is None or sum(each.nbytes for each in tensors if not each.is_cuda) < _LARGE_BATCH:
                return self._move(batch, self._device, non_blocking=True), None
            with torch.cuda.stream(stream):
                moved = self._move(batch, self._device, non_blocking=True)
                return moved, stream.record_event()
        return None


def _tensors_in(batch: Any) -> list[torch.Tensor] | None:
    """The tensors of a batch; None if it contains an opaque object that can be moved."""
    movable = [leaf for leaf in leaves(batch) if hasattr(leaf, "to")]
    return movable if all(isinstance(leaf, torch.Tensor) for leaf in movable) else None
