"""From a dataset to this rank's `RunLoader`, in the order in which a run does it.

A dataset is checked, and gets a torch `DataLoader` from defaults and the user's arguments. Any loader, ours or the
user's, becomes a `RunLoader`: this rank's part of it, with batches in a known order, copied to the device.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import warnings
from collections import UserDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, SequentialSampler

from pytorch_accelerated.data.ordering import drawn_seed
from pytorch_accelerated.data.planned_loader import PlannedLoader
from pytorch_accelerated.data.rows import ArrayDataset, as_array_dataset
from pytorch_accelerated.data.stream_loader import StreamLoader
from pytorch_accelerated.data.streams import divides_itself, is_stateful_loader
from pytorch_accelerated.data.updates import DeviceFeed, RunLoader
from pytorch_accelerated.errors import ArgumentTypeError, ConfigurationError, DataError
from pytorch_accelerated.facts.accumulation import Accumulation
from pytorch_accelerated.facts.trees import leaves
from pytorch_accelerated.ranks.accelerators import send_to_device
from pytorch_accelerated.ranks.compat.accelerate import given_loader
from pytorch_accelerated.ranks.ranks import Ranks

LIMIT_BATCHES_ENV_VAR = "PT_ACC_LIMIT_BATCHES"


def default_loader_kwargs(dataset: Any, *, batch_size: int, shuffle: bool) -> dict[str, Any]:
    """The default keyword arguments of a `DataLoader` for `dataset`."""
    kwargs: dict[str, Any] = {"batch_size": batch_size, "pin_memory": torch.cuda.is_available(), "num_workers": 0}
    if not isinstance(dataset, IterableDataset):
        kwargs["shuffle"] = shuffle
    return kwargs


def build_loader(
    dataset: Any, defaults: Mapping[str, Any], given: Mapping[str, Any] | None, collate_fn: Any
) -> Iterable[Any]:
    """A torch `DataLoader` over `dataset`. The keyword arguments `given` override `defaults`.

    A `DataLoader`, or an object that can only be iterated over, is returned unchanged.
    """
    names = ((kind.__module__.partition(".")[0], kind.__name__) for kind in type(dataset).__mro__)
    # webdataset's `WebLoader` is a loader, though its class is an `IterableDataset`.
    if isinstance(dataset, DataLoader) or ("webdataset", "WebLoader") in names:
        return dataset  # type: ignore[no-any-return]
    arrays = check_dataset(dataset)
    if not isinstance(dataset, IterableDataset) and not hasattr(dataset, "__getitem__"):
        return dataset  # type: ignore[no-any-return]
    kwargs = effective_kwargs(defaults, given)
    kwargs.pop("is_sharded", None)
    # The loader's `dataset` is the user's own torch dataset; plain tensors and arrays need one that makes rows.
    source = arrays if arrays is not None and type(dataset) in _BARE_ARRAYS else dataset
    if collate_fn is not None:
        kwargs.setdefault("collate_fn", collate_fn)
    if kwargs.get("num_workers", 0) > 0 and not isinstance(dataset, IterableDataset):
        # Not for streams: `set_epoch` would not reach persistent workers.
        kwargs.setdefault("persistent_workers", True)
    if kwargs.get("shuffle") and hasattr(source, "__len__") and len(source) == 0:
        kwargs["shuffle"] = False  # torch refuses to shuffle an empty dataset; `refuse_empty` explains it better
    loader = DataLoader(source, **kwargs)
    # Where nobody asked for a number of workers, or for none, rows may be fetched ahead, as workers would.
    loader.reads_ahead = "num_workers" not in (given or {})
    return loader


_BARE_ARRAYS: tuple[type, ...] = (torch.Tensor, tuple, dict)


def effective_kwargs(defaults: Mapping[str, Any], given: Mapping[str, Any] | None) -> dict[str, Any]:
    """`defaults` overridden by `given`, without the defaults that torch does not accept together with `given`."""
    kwargs = {**defaults, **(given or {})}
    excluded: tuple[str, ...] = ()
    if kwargs.get("batch_sampler") is not None:
        excluded = ("batch_size", "shuffle", "sampler", "drop_last")
    elif kwargs.get("sampler") is not None:
        excluded = ("shuffle",)
    return {name: value for name, value in kwargs.items() if name not in excluded or name in (given or {})}


def check_dataset(dataset: Any, *, num_passes: int | None = 1) -> ArrayDataset | None:
    """Refuse what cannot be a dataset, before anything is started.

    Args:
        dataset: of a run.
        num_passes: the number of passes over the dataset; None if not known yet.

    Returns:
        The dataset as an `ArrayDataset`, if it is data in memory.

    Raises:
        ArgumentTypeError: for an object without samples.
        ConfigurationError: for an object that would be used up before the last pass.
        DataError: for a dict that is not a dict of arrays, or arrays of different lengths.
    """
    if isinstance(dataset, (str, bytes, type)) or not (
        hasattr(dataset, "__getitem__") or isinstance(dataset, Iterable)
    ):
        raise ArgumentTypeError(
            f"{dataset!r} is not a dataset: a {type(dataset).__name__} has no samples. Pass a torch Dataset or "
            "IterableDataset, tensors or arrays (or a tuple or dict of them), or a DataLoader."
        )
    for item in dataset if type(dataset) is tuple else (dataset,):
        if hasattr(item, "to_numpy"):  # of pandas, polars and others
            raise ArgumentTypeError(
                f"A {type(item).__name__} is not a dataset: its rows are not samples that torch can put into a batch. "
                'Pass arrays, for example `(table[inputs].to_numpy("float32"), table[target].to_numpy())`.'
            )
    arrays = as_array_dataset(dataset)  # refuses arrays of different lengths
    if arrays is not None:
        return arrays
    refuse_several(dataset)
    shapes: list[Any] = [getattr(item, "shape", None) for item in (dataset if type(dataset) is list else ())]
    # Two arrays with one number of rows, which cannot be samples of one batch.
    if len(shapes) == 2 and all(shapes) and shapes[0] != shapes[1] and shapes[0][0] == shapes[1][0] > 1:
        raise ArgumentTypeError(
            "A list is a sequence of samples, so this one of two arrays has two samples. For columns, pass a tuple."
        )
    # An iterator that can't be restarted; some classes of users restart in `__iter__`.
    is_used_up = isinstance(dataset, Iterator) and type(dataset).__module__ in ("builtins", "itertools")
    if is_used_up and num_passes is not None and num_passes > 1:
        raise ConfigurationError(
            f"The dataset is a {type(dataset).__name__}, which can be iterated over only once, but the run has "
            f"{num_passes} epochs. Pass a list, or an object whose `__iter__` returns a new iterator."
        )
    if isinstance(dataset, (dict, UserDict)):
        raise ArgumentTypeError(
            f"A {type(dataset).__name__} with the entries {', '.join(map(repr, dataset)) or '(none)'} could be several "
            "datasets, or one in columns. Pass one of its entries, or `dict(...)` of it if they are arrays."
        )
    return None


def refuse_several(dataset: Any) -> None:
    """Refuse a list of datasets, which has no rows.

    Raises:
        ArgumentTypeError: if it is one.
    """
    if type(dataset) not in (list, tuple) or not dataset:
        return
    if all(isinstance(each, (Dataset, DataLoader)) or hasattr(each, "column_names") for each in dataset):
        raise ArgumentTypeError(
            f"A {type(dataset).__name__} of {len(dataset)} datasets could be several, or one of all their rows. For "
            "multiple evaluation sets, pass a dict with a name for each; for all rows, "
            "`torch.utils.data.ConcatDataset(...)` of them."
        )


def named_sets(dataset: Any) -> dict[str, Any]:
    """The evaluation sets that `dataset` consists of, by name, in order; none if it is a single set.

    A dict is multiple sets if none of its values is a tensor, an array or a dict: with these it is one set in columns.

    Raises:
        ArgumentTypeError: if a name is not a string, or empty.
    """
    is_one = not isinstance(dataset, dict) or any(
        isinstance(each, (torch.Tensor, np.ndarray)) or type(each) is dict for each in dataset.values()
    )
    if is_one:
        return {}
    for name in dataset:
        if not isinstance(name, str) or not name:
            raise ArgumentTypeError(
                f"An evaluation set is called {name!r}, but names of metrics begin with it. Use a string, not empty."
            )
    return dict(dataset)


def check_eval_dataset(dataset: Any, *, num_passes: int | None = 1) -> None:
    """Refuse what is neither a dataset nor a dict of datasets; see `check_dataset`."""
    for each in named_sets(dataset).values() or (dataset,):
        check_dataset(each, num_passes=num_passes)


# ------------------------------------------------------------------------------------------------ a loader of this rank


def distribute_loader(
    loader: Any,
    ranks: Ranks,
    *,
    seed: int,
    saved_seed: int | None = None,
    accumulation: Accumulation,
    is_sharded: bool = False,
    lanes: int | None = None,
) -> RunLoader:
    """This rank's part of the user's `loader`. Must be called by all ranks.

    Args:
        loader: a torch `DataLoader` or another iterable of batches.
        ranks: the processes.
        seed: of the order of the rows, if the loader has no seed of its own.
        saved_seed: the seed in a resumed run, whatever generators are like now.
        accumulation: batches of a rank per update.
        is_sharded: whether the loader already yields only this rank's rows, which is known of litdata, Ray Data,
            MosaicML's streaming, and what `split_dataset_by_node` of `datasets` returns.
        lanes: the batches of a round, whatever the number of ranks; None: one per rank.

    Raises:
        ArgumentTypeError: if `loader` cannot be iterated over.
        ConfigurationError: for a stream that is divided for another number of ranks.
        DataError: if the ranks have different rows.
    """
    loader = given_loader(loader)
    if not isinstance(loader, Iterable) and not hasattr(loader, "__getitem__"):
        raise ArgumentTypeError(
            f"A {type(loader).__name__} is not a loader. Return a DataLoader or another iterable of batches."
        )
    # A loader's own generator decides, as it would without a trainer. Every rank draws, so generators stay in step.
    own_seed = ranks.from_first(drawn_seed(loader))
    seed = next(each for each in (saved_seed, own_seed, seed) if each is not None)
    feed = device_feed(ranks.device, send_to_device)
    settings: dict[str, Any] = {"seed": seed, "accumulation": accumulation, "feed": feed}
    is_torch_loader = isinstance(loader, DataLoader) and (
        type(loader).__iter__ is DataLoader.__iter__ or is_stateful_loader(loader)
    )
    is_stream = is_torch_loader and isinstance(loader.dataset, IterableDataset)
    if is_torch_loader and not is_stream and loader.batch_sampler is not None:
        adapted: RunLoader = PlannedLoader(loader, ranks, lanes=lanes, **settings)
    else:
        if lanes is not None:
            raise ConfigurationError(
                f"`lanes` needs rows with numbers, but the {type(loader).__name__} is a stream: which of its rows a "
                "process gets depends on how many there are. Pass a dataset with `__getitem__` and `__len__`."
            )
        sources = (loader, getattr(loader, "dataset", None))
        is_sharded = is_sharded or any(divides_itself(source, ranks.count) for source in sources)
        if ranks.count > 1 and not is_stream and not is_sharded and ranks.is_first:
            warnings.warn(
                f"The {type(loader).__name__} is used as it is on each of the {ranks.count} ranks. If it yields "
                "different batches on each, pass `is_sharded=True` among the loader's arguments; if not, a dataset or "
                "a DataLoader.",
                stacklevel=2,
            )
        adapted = StreamLoader(loader, ranks, is_sharded=is_sharded, **settings)
    if ranks.count > 1:  # a comparison fetches rows for fingerprints
        refuse_other_rows(adapted, ranks)
    return adapted


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
    by_rank = ranks.exchange(loader.fingerprint)
    difference = next(filter(None, map(by_rank[0].difference, by_rank)), None)
    if difference is None:
        return
    lengths = [theirs.rows for theirs in by_rank]
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
        return iter
    if device.type == "cuda":
        return _CudaFeed(device, move)
    return lambda batches: (move(batch, device, non_blocking=True) for batch in batches)


class _CudaFeed:
    """Copies one batch ahead, on its own stream if it is large."""

    def __init__(self, device: torch.device, move: Callable[..., Any]) -> None:
        self._device = device
        self._move = move
        # One for all passes: torch keeps freed memory for the stream that asked for it.
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def __call__(self, batches: Iterator[Any]) -> Iterator[Any]:
        ahead = self._copy_next(batches)
        while ahead is not None:
            batch, copied = ahead
            if copied is not None:
                current = torch.cuda.current_stream(self._device)
                current.wait_event(copied)  # the stream waits, the host does not
                for tensor in _tensors_in(batch) or ():
                    # The other stream owns the memory and must not reuse it before this stream has finished with it.
                    tensor.record_stream(current)
            ahead = self._copy_next(batches)
            yield batch

    def _copy_next(self, batches: Iterator[Any]) -> tuple[Any, torch.cuda.Event | None] | None:
        for batch in batches:
            tensors = _tensors_in(batch)
            if tensors is None or sum(each.nbytes for each in tensors if not each.is_cuda) < _LARGE_BATCH:
                return self._move(batch, self._device, non_blocking=True), None
            with torch.cuda.stream(self._stream):
                moved = self._move(batch, self._device, non_blocking=True)
                return moved, self._stream.record_event()
        return None


def _tensors_in(batch: Any) -> list[torch.Tensor] | None:
    """The tensors of a batch; None if it contains an opaque object that can be moved."""
    movable = [leaf for leaf in leaves(batch) if hasattr(leaf, "to")]
    return movable if all(isinstance(leaf, torch.Tensor) for leaf in movable) else None


# ---------------------------------------------------------------------------------------------- limits for quick trials


class DataLoaderSlice:
    """The first `slice_size` batches of each pass over a loader; all other attributes are the loader's.

    A slice of a `RunLoader` is a `RunLoader` too, with the limit as its `max_batches`.

    Args:
        dl: any iterable of batches.
        slice_size: the number of batches of one rank, at least 1.

    Raises:
        ConfigurationError: if `slice_size` is not a positive whole number.
    """

    def __new__(cls, dl: Any, slice_size: int) -> Any:
        """A slice, or a `RunLoader` with a limit."""
        if cls is not DataLoaderSlice or not isinstance(dl, RunLoader):
            return super().__new__(cls)
        limited: Any = dl.limited(checked_limit(slice_size, name="slice_size"))
        limited.dl, limited.slice_size = dl, slice_size  # the attributes of any other slice
        return limited

    def __init__(self, dl: Any, slice_size: int) -> None:
        self.dl = dl
        self.slice_size = checked_limit(slice_size, name="slice_size")

    def __getnewargs__(self) -> tuple[Any, int]:
        """The arguments for making a copy."""
        return self.dl, self.slice_size

    def __iter__(self) -> Iterator[Any]:
        return itertools.islice(self.dl, self.slice_size)

    def __len__(self) -> int:
        """The number of batches, at most the loader's; a TypeError if the loader has no length."""
        return min(self.slice_size, len(self.dl))

    def __getattr__(self, name: str) -> Any:
        if name == "dl":  # not there yet: an unpickled copy, for example
            raise AttributeError(name)
        return getattr(self.dl, name)


class LimitBatches(contextlib.ContextDecorator):
    """Limits the training and evaluation batches of every trainer that is created within the block.

    Blocks may be nested: after the inner block, the outer limit applies again. The limit is stored in the environment
    variable ``PT_ACC_LIMIT_BATCHES``, which can also be set from outside; "none" means no limit.

    Args:
        num_batches: batches of one rank and epoch, at least 1.

    Raises:
        ConfigurationError: if `num_batches` is not a positive whole number.
    """

    def __init__(self, num_batches: int) -> None:
        self.num_batches = checked_limit(num_batches, name="num_batches")
        self._outer: list[str | None] = []

    def __enter__(self) -> LimitBatches:
        self._outer.append(os.environ.get(LIMIT_BATCHES_ENV_VAR))
        os.environ[LIMIT_BATCHES_ENV_VAR] = str(self.num_batches)
        return self

    def __exit__(self, *exception_info: object) -> None:
        outer = self._outer.pop()
        if outer is None:
            os.environ.pop(LIMIT_BATCHES_ENV_VAR, None)
        else:
            os.environ[LIMIT_BATCHES_ENV_VAR] = outer


def batch_limit_from_environment() -> int | None:
    """The limit in ``PT_ACC_LIMIT_BATCHES``, if any; a `ConfigurationError` if the value is invalid."""
    value = os.environ.get(LIMIT_BATCHES_ENV_VAR, "none").strip()
    if value.lower() in ("", "none"):
        return None
    return checked_limit(int(value) if value.isdigit() else value, name=LIMIT_BATCHES_ENV_VAR)


def checked_limit(limit: Any, *, name: str) -> int:
    """`limit`, if it is a positive whole number."""
    if isinstance(limit, bool) or not isinstance(limit, int) or limit < 1:
        raise ConfigurationError(f"{name} is {limit!r}, but a number of batches is a whole number of at least 1.")
    return limit
