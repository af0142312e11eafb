"""Makes the torch `DataLoader` for a dataset from defaults and the user's arguments; limits the number of batches."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections import UserDict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from pytorch_accelerated.data.rows import as_array_dataset
from pytorch_accelerated.data.updates import RunLoader
from pytorch_accelerated.errors import ArgumentTypeError, ConfigurationError

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
    if isinstance(dataset, DataLoader) or is_web_loader(dataset):
        return dataset  # type: ignore[no-any-return]
    check_dataset(dataset)
    if not isinstance(dataset, IterableDataset) and not hasattr(dataset, "__getitem__"):
        return dataset  # type: ignore[no-any-return]
    kwargs = effective_kwargs(defaults, given)
    kwargs.pop("is_sharded", None)
    arrays = as_array_dataset(dataset)
    # The loader's `dataset` is the user's own torch dataset; plain tensors and arrays need one that makes rows.
    source = arrays if arrays is not None and type(dataset) in _BARE_ARRAYS else dataset
    if collate_fn is not None:
        kwargs.setdefault("collate_fn", collate_fn)
    if kwargs.get("num_workers", 0) > 0 and not isinstance(dataset, IterableDataset):
        # Not for streams: `set_epoch` would not reach persistent workers.
        kwargs.setdefault("persistent_workers", True)
    if kwargs.get("shuffle") and hasattr(source, "__len__") and len(source) == 0:
        kwargs["shuffle"] = False  # torch refuses to shuffle an empty dataset; `refuse_empty` explains it better
    return DataLoader(source, **kwargs)


def _are_columns(first: Any, second: Any) -> bool:
    """Whether two values have one number of rows, but cannot be samples of one batch."""
    shapes: list[Any] = [getattr(value, "shape", None) for value in (first, second)]
    return all(shapes) and shapes[0] != shapes[1] and shapes[0][0] == shapes[1][0] > 1


_BARE_ARRAYS: tuple[type, ...] = (torch.Tensor, tuple, dict)


def effective_kwargs(defaults: Mapping[str, Any], given: Mapping[str, Any] | None) -> dict[str, Any]:
    """`defaults` overridden by `given`, without the defaults that torch does not accept together with `given`."""
    kwargs = {**defaults, **(given or {})}
    if "batch_sampler" in kwargs and kwargs["batch_sampler"] is not None:
        excluded = {"batch_size", "shuffle", "sampler", "drop_last"}
    elif kwargs.get("sampler") is not None:
        excluded = {"shuffle"}
    else:
        excluded = set()
    return {name: value for name, value in kwargs.items() if name not in excluded or name in (given or {})}


def check_dataset(dataset: Any, *, num_passes: int | None = 1) -> None:
    """Refuse what cannot be a dataset, before anything is started.

    Args:
        dataset: of a run.
        num_passes: the number of passes over the dataset; None if not known yet.

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
                f"A {type(item).__name__} is no dataset: its rows are no samples that torch can put into a batch. Pass "
                'arrays, for example `(table[inputs].to_numpy("float32"), table[target].to_numpy())`.'
            )
    if type(dataset) is list and len(dataset) == 2 and _are_columns(*dataset):
        raise ArgumentTypeError(
            "A list is a sequence of samples, so this one of two arrays has two samples. For columns, pass a tuple."
        )
    refuse_several(dataset)
    if is_used_up_by_one_pass(dataset) and num_passes is not None and num_passes > 1:
        raise ConfigurationError(
            f"The dataset is a {type(dataset).__name__}, which can be iterated over only once, but the run has "
            f"{num_passes} epochs. Pass a list, or an object whose `__iter__` returns a new iterator."
        )
    if isinstance(dataset, (dict, UserDict)) and type(dataset) is not dict:
        raise ArgumentTypeError(
            f"A {type(dataset).__name__} with the entries {', '.join(map(repr, dataset)) or '(none)'} could be several "
            "datasets, or one in columns. Pass one of its entries, or `dict(...)` of it if they are arrays."
        )
    as_array_dataset(dataset)  # refuses arrays of different lengths


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
            "several evaluation sets, pass a dict with a name for each; for all rows, "
            "`torch.utils.data.ConcatDataset(...)` of them."
        )


def named_sets(dataset: Any) -> dict[str, Any]:
    """The evaluation sets that `dataset` consists of, by name, in order; none if it is a single set.

    A dict is several sets if none of its values is a tensor, an array or a dict: with these it is one set in columns.

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


def is_used_up_by_one_pass(batches: Any) -> bool:
    """Whether this is an iterator that can't be restarted: some classes of users restart in `__iter__`."""
    return isinstance(batches, Iterator) and type(batches).__module__ in ("builtins", "itertools")


def is_web_loader(dataset: Any) -> bool:
    """Whether this is webdataset's `WebLoader`: a loader, though its class is an `IterableDataset`."""
    names = ((kind.__module__.partition(".")[0], kind.__name__) for kind in type(dataset).__mro__)
    return ("webdataset", "WebLoader") in names


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
        """The number of batches, at most that of the loader; a TypeError if the loader has no length."""
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
