"""Loaders and samplers of a Hugging Face trainer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, Sampler, SequentialSampler

from pytorch_accelerated.errors import ConfigurationError, DataError
from pytorch_accelerated.huggingface.arguments.strategies import SamplingStrategy

if TYPE_CHECKING:
    from pytorch_accelerated.huggingface.arguments.training_arguments import TrainingArguments

# Rows are sorted by length within so many batches: few enough that epochs differ, enough for rows of similar length.
_BATCHES_PER_POOL = 50


def make_loader(
    dataset: Any,
    args: TrainingArguments,
    *,
    batch_size: int,
    collate_fn: Callable[[list[Any]], Any],
    sampler: Sampler[int] | None,
    drop_last: bool,
) -> DataLoader[Any]:
    """A torch `DataLoader` with all rows, which the engine distributes over the processes.

    Its ``total_batch_size`` is the number of rows of a batch over all processes.
    """
    if not isinstance(dataset, IterableDataset) and not hasattr(dataset, "__getitem__"):
        raise DataError(
            f"A dataset is a {type(dataset).__name__}, which has no rows by number. Make a list of it, or give an "
            "object of a torch `IterableDataset` whose `__iter__` restarts it for each pass."
        )
    kwargs: dict[str, Any] = {
        "batch_size": batch_size,
        "collate_fn": collate_fn,
        "num_workers": args.dataloader_num_workers,
        "pin_memory": args.dataloader_pin_memory and torch.accelerator.is_available(),
        "persistent_workers": args.dataloader_persistent_workers,
        "prefetch_factor": args.dataloader_prefetch_factor,
        "multiprocessing_context": args.dataloader_multiprocessing_context,
    }
    if not isinstance(dataset, IterableDataset):
        kwargs.update(sampler=sampler, drop_last=drop_last)
    loader: DataLoader[Any] = DataLoader(dataset, **kwargs)
    loader.total_batch_size = batch_size * args.world_size
    return loader


class LoadersBySet:
    """Keeps loaders with their datasets, so that each dataset has one pool of workers.

    Datasets are compared by identity and kept alive, because an address or a name may belong to another dataset later.
    Beyond `limit` datasets, the least recently used one is dropped.
    """

    def __init__(self, limit: int = 8) -> None:
        self._limit = limit
        self._pairs: list[tuple[Any, DataLoader[Any]]] = []

    def get(self, dataset: Any, make: Callable[[Any], DataLoader[Any]]) -> DataLoader[Any]:
        """The loader of `dataset`, made by `make` on first use."""
        pair = next((pair for pair in self._pairs if pair[0] is dataset), None) or (dataset, make(dataset))
        self._pairs = [*(other for other in self._pairs if other is not pair), pair][-self._limit :]
        return pair[1]


def training_sampler(dataset: Any, args: TrainingArguments, input_name: str, batch_size: int) -> Sampler[int] | None:
    """The order of the training rows that the arguments name; None for a dataset with its own order.

    Args:
        dataset: the rows.
        args: of the trainer.
        input_name: the column whose length is that of the row, unless another column holds the length.
        batch_size: rows of an update on one process.
    """
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        return None
    if args.train_sampling_strategy == SamplingStrategy.SEQUENTIAL:
        return SequentialSampler(dataset)
    if args.train_sampling_strategy == SamplingStrategy.GROUP_BY_LENGTH:
        return LengthGroupedSampler(row_lengths(dataset, args.length_column_name, input_name), batch_size)
    return RandomSampler(dataset)


class LengthGroupedSampler(Sampler[int]):
    """Yields rows in random order, but with rows of similar length in each batch.

    The first batch has the longest row, so that running out of memory happens at once.
    """

    def __init__(self, lengths: Sequence[int], batch_size: int) -> None:
        self._lengths = torch.as_tensor(lengths)
        self._batch_size = batch_size

    def __len__(self) -> int:
        return len(self._lengths)

    def __iter__(self) -> Iterator[int]:
        order = torch.randperm(len(self))
        pools = [
            pool[self._lengths[pool].argsort(descending=True, stable=True)]
            for pool in torch.split(order, _BATCHES_PER_POOL * self._batch_size)
        ]
        longest = max(range(len(pools)), key=lambda index: int(self._lengths[pools[index][0]]), default=0)
        pools[:1], pools[longest : longest + 1] = pools[longest : longest + 1], pools[:1]
        return iter(torch.cat(pools).tolist() if pools else [])


def row_lengths(dataset: Any, length_column: str, input_name: str) -> list[int]:
    """The length of each row: its column `length_column`, or else the length of its inputs."""
    columns = getattr(dataset, "column_names", None)
    if isinstance(columns, list) and length_column in columns:
        return list(dataset[length_column])
    first = dataset[0] if len(dataset) else {}
    if not isinstance(first, Mapping) or not (length_column in first or input_name in first):
        has = ", ".join(map(repr, first)) if isinstance(first, Mapping) else f"a {type(first).__name__}"
        raise ConfigurationError(
            f"Rows should be grouped by length, but a row has {has}: neither {length_column!r}, which would tell its "
            f"length, nor {input_name!r}, which has one. Add such a column, name it with `length_column_name`, or "
            "choose another `train_sampling_strategy`."
        )
    if length_column in first:
        return [int(row[length_column]) for row in dataset]
    return [len(row[input_name]) for row in dataset]


class PaddingCollator:
    """Pads rows with the method `pad` of a tokenizer."""

    def __init__(self, processing_class: Any) -> None:
        self._pad = processing_class.pad

    def __call__(self, features: list[Any]) -> Any:
        batch = self._pad(features, return_tensors="pt")
        for name in ("label", "label_ids"):
            if name in batch:
                batch["labels"] = batch.pop(name)
        return batch


def refuse_missing(dataset: Any, purpose: str, argument: str) -> None:
    """Reject a missing dataset, or one without rows."""
    if dataset is None:
        raise ConfigurationError(f"There is no dataset to {purpose}. Pass `{argument}`.")
    if isinstance(dataset, Mapping):
        raise DataError(
            f"`{argument}` is a dict of {', '.join(map(repr, dataset)) or 'nothing'}, which has no rows to {purpose}. "
            "Pass one of its datasets; of columns make a `datasets.Dataset.from_dict`, or a list with a dict for each "
            "row."
        )
    if hasattr(dataset, "__len__") and not len(dataset):
        raise DataError(f"`{argument}` is empty, so there is nothing to {purpose}. Check how it was made.")


def dataset_named(name: str, datasets: Any) -> Any:
    """One of several evaluation sets."""
    sets = datasets if isinstance(datasets, Mapping) else {}
    if name not in sets:
        raise ConfigurationError(
            f"There is no evaluation set {name!r}, only {', '.join(map(repr, sets)) or 'none by name'}. Give one of "
            "these, or a dataset."
        )
    return sets[name]


def number_of_rows(loader: Any) -> int:
    """The number of rows of one pass over all processes."""
    dataset = getattr(loader, "dataset", None)
    if dataset is not None and hasattr(dataset, "__len__"):
        return len(dataset)
    if hasattr(loader, "__len__"):
        return len(loader) * (getattr(loader, "batch_size", None) or 1)
    raise DataError(
        f"Neither the {type(loader).__name__} nor its dataset has a length, so the number of rows is unknown. "
        "Give the dataset a `__len__`, or count the rows yourself."
    )
