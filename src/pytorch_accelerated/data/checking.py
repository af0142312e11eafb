"""Checks before a loader is used: it has batches, their order is known, and all ranks have the same data."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler

from pytorch_accelerated.data.fingerprints import hash_of_contents
from pytorch_accelerated.data.updates import RunLoader
from pytorch_accelerated.errors import ConfigurationError, DataError
from pytorch_accelerated.processes.ranks import Ranks


def refuse_empty(loader: RunLoader, purpose: str) -> None:
    """Refuse a loader that is known to have no batches, with a `DataError` that there is nothing to `purpose`."""
    if loader.num_batches == 0:
        raise empty_loader_error(loader, purpose)


def empty_loader_error(loader: Any, purpose: str) -> DataError:
    """The error for a loader that yields no batches."""
    dataset = getattr(loader, "dataset", None)
    source = loader.source if isinstance(loader, RunLoader) else loader
    iterators = [type(part).__name__ for part in (source, dataset) if isinstance(part, Iterator)]
    used_up = (
        f" It is an iterator ({iterators[0]}), which is used up after one pass: pass something that can be iterated "
        "over again."
        if iterators
        else ""
    )
    of_dataset = "" if dataset is None else f" of the {type(dataset).__name__}"
    names = {"num_samples": "samples", "batch_size": "batch size", "drop_last": "drop_last"}
    facts = {word: getattr(loader, name, None) for name, word in names.items()}
    shown = ", ".join(f"{word}: {value}" for word, value in facts.items() if value is not None)
    return DataError(
        f"There is nothing to {purpose}: the loader{of_dataset} yields no batches{f' ({shown})' if shown else ''}. "
        f"Check the length of the data, the batch size and `drop_last`.{used_up}"
    )


def refuse_rearranged(loader: RunLoader) -> None:
    """Refuse predictions with a loader that shuffles or leaves samples out: rows could not be matched with samples."""
    if loader.is_shuffled or loader.drop_last:
        raise ConfigurationError(
            f"Predictions come in the order of the dataset, one for each sample, but the loader "
            f"{'shuffles' if loader.is_shuffled else 'leaves out samples at the end (drop_last=True)'}. Pass the "
            "dataset itself, or a loader that doesn't do this."
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
            f"`overfit_batches` takes the first batches of the dataset, but the loader has a "
            f"{type(others[0]).__name__}, which may choose others in every epoch. Pass the dataset itself, or a loader "
            "with `shuffle=False`."
        )


def refuse_other_rows(loader: RunLoader, ranks: Ranks) -> None:
    """Refuse a loader whose rows are not the same on every rank. Must be called by all ranks.

    Raises:
        DataError: says how they differ.
    """
    if ranks.count == 1:
        return  # without a comparison, no rows need to be fetched for fingerprints
    own = loader.fingerprint
    everyones = ranks.exchange(own)
    difference = next(filter(None, map(everyones[0].difference, everyones)), None)
    if difference is None:
        return
    without_contents = [dataclasses.replace(theirs, contents=None) for theirs in everyones]
    is_of_contents = not any(map(without_contents[0].difference, without_contents))
    # The rows of a dataset with its own generator differ each time they are fetched.
    if is_of_contents and ranks.any(hash_of_contents(loader.source) != own.contents):
        loader.fingerprint = without_contents[0]
        return
    lengths = [theirs.rows for theirs in everyones]
    raise DataError(
        f"The ranks have different datasets ({type(loader.dataset).__name__}; lengths by rank: {lengths}; some rank "
        f"has {difference}), so samples would be used twice or never. If they were split at random, call "
        "`set_seed(...)` before the split; if they were listed from a folder, sort the list."
    )
