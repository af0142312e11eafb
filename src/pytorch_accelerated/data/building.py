"""Makes the torch `DataLoader` for a dataset from defaults and the user's arguments."""

from __future__ import annotations

import os
from collections import UserDict
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from pytorch_accelerated.data.arrays import as_array_dataset
from pytorch_accelerated.data.ready_batches import is_used_up_by_one_pass
from pytorch_accelerated.data.worker_choice import AutomaticWorkers, usable_processors
from pytorch_accelerated.errors import ArgumentTypeError, ConfigurationError


def default_loader_kwargs(dataset: Any, *, batch_size: int, shuffle: bool, ranks_on_node: int) -> dict[str, Any]:
    """The default keyword arguments of a `DataLoader` for `dataset`."""
    kwargs: dict[str, Any] = {
        "batch_size": batch_size,
        "pin_memory": torch.cuda.is_available(),
        "num_workers": AutomaticWorkers(_processors_for_workers(dataset, ranks_on_node)),
    }
    if not isinstance(dataset, IterableDataset):
        kwargs["shuffle"] = shuffle
    return kwargs


def _processors_for_workers(dataset: Any, ranks_on_node: int) -> int:
    """The number of processors that this rank and its workers may use; 0 where there can't be any workers.

    These cases are streams (each worker would yield the whole stream unless the dataset prevents it), processes that
    may not have children, and processes that are not forked.
    """
    is_stream = isinstance(dataset, (IterableDataset, DataLoader)) or not hasattr(dataset, "__len__")
    if is_stream or torch.multiprocessing.current_process().daemon:
        return 0
    if torch.multiprocessing.get_start_method(allow_none=True) not in (None, "fork") or os.name != "posix":
        return 0
    return max(1, usable_processors() // ranks_on_node)


def advice_on_waiting(loader: Any) -> str:
    """Advice for a run that spends much time waiting for `loader`."""
    workers, spare = getattr(loader, "num_workers", None), max(1, usable_processors() - 1)
    is_automatic = isinstance(getattr(getattr(loader, "source", None), "num_workers", None), AutomaticWorkers)
    if getattr(loader, "is_vectorised", False):
        return "a batch is one indexing operation already; larger batches, or files on a faster disk, would help."
    if workers is None:
        return "the loader is your own, so let it prepare batches ahead, in a thread or in processes."
    if workers < spare and not is_automatic:
        return (
            f"{workers or 'no'} worker processes fetch it, but {spare} could: try train_dataloader_kwargs="
            f"{{'num_workers': {spare}}}."
        )
    fetching = f"{workers} worker processes fetch it, as many as this machine has room for"
    if is_automatic:
        fetching = "as many processes fetch it as this machine has room for"
    return (
        f"{fetching}: do costly steps once, before "
        "training, or give the dataset `__getitems__` to fetch a whole batch at once."
    )


def build_loader(
    dataset: Any, defaults: Mapping[str, Any], given: Mapping[str, Any] | None, collate_fn: Any
) -> Iterable[Any]:
    """A torch `DataLoader` over `dataset`. The keyword arguments `given` override `defaults`.

    A `DataLoader`, or an object that can only be iterated over, is returned unchanged.
    """
    if isinstance(dataset, DataLoader):
        return dataset
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
    try:
        return DataLoader(source, **kwargs)
    except (TypeError, ValueError) as error:
        shown = ", ".join(f"{name}={value!r}" for name, value in kwargs.items())
        raise ConfigurationError(
            f"torch's DataLoader refused the arguments {shown} for a {type(dataset).__name__}: {error}. "
            "Change the loader's keyword arguments."
        ) from error


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
    if is_used_up_by_one_pass(dataset) and num_passes is not None and num_passes > 1:
        raise ConfigurationError(
            f"The dataset is a {type(dataset).__name__}, which can be iterated over only once, but the run has "
            f"{num_passes} epochs. Pass something that can be iterated over again, such as a list or an object whose "
            "`__iter__` returns a new iterator."
        )
    if isinstance(dataset, (dict, UserDict)) and type(dataset) is not dict:
        raise ArgumentTypeError(
            f"A {type(dataset).__name__} with the entries {', '.join(map(repr, dataset)) or '(none)'} could be several "
            "datasets, or one in columns. Pass one of its entries, or `dict(...)` of it if they are arrays."
        )
    needs_length = as_array_dataset(dataset) is None and not isinstance(dataset, (IterableDataset, DataLoader))
    if needs_length and hasattr(dataset, "__getitem__") and not hasattr(dataset, "__len__"):
        raise ArgumentTypeError(
            f"The dataset {type(dataset).__name__} has `__getitem__` but no `__len__`, so its number of samples is "
            "unknown. Add `__len__`, or make it an IterableDataset."
        )
