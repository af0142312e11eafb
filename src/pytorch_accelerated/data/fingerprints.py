"""Fingerprints of the rows that a loader reads, to detect that another rank, or an earlier run, reads different rows.

A random split without a seed differs between processes, but its length does not. Fingerprints therefore include the
indices of a `Subset` and the contents of some rows.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import numbers
import operator
import warnings
from collections.abc import Iterator, Sequence
from pathlib import PurePath
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset

from pytorch_accelerated.data.workers import begin_pass, end_pass, like_loader
from pytorch_accelerated.facts.seeding import with_seed
from pytorch_accelerated.facts.trees import leaves_by_path, length_of

_KEY = 41  # an arbitrary fixed seed for fetching rows
_VERSION = 2  # of the way hashes are made; hashes of other versions, in older states, are not compared
_ARRAY_NAMES = {"__array__", "__array_interface__"}
_MAX_FLOATS = 2**20  # of one array


@dataclasses.dataclass(frozen=True)
class Fingerprint:
    """A summary of the rows of a loader.

    Attributes:
        rows: the number of rows; None if unknown.
        indices: hash of the indices of all nested `Subset`s; None without one.
        contents: hash of the contents of the first, the middle and the last row; None if they can't be fetched, or
            differ each time.
    """

    rows: int | None = None
    indices: str | None = None
    contents: str | None = None

    def difference(self, other: Fingerprint) -> str | None:
        """How the rows of `other` differ from these, in words; None if no difference is known."""
        if None not in (self.rows, other.rows) and self.rows != other.rows:
            return f"{other.rows} rows instead of {self.rows}"
        if _differ(self.indices, other.indices):
            return "a `Subset` with other indices"
        if _differ(self.contents, other.contents):
            return "rows with other contents"
        return None


def fingerprint_of(loader: Any) -> Fingerprint:
    """The fingerprint of the data of `loader`, a torch `DataLoader` or any other object."""
    dataset = getattr(loader, "dataset", None)
    return Fingerprint(length_of(dataset), _hash_of_indices(dataset), hash_of_contents(loader))


def hash_of_contents(loader: Any) -> str | None:
    """A hash of some rows of the dataset of `loader`, which are fetched for this, twice.

    If the loader has workers, a temporary worker fetches them, because many datasets open a file at the first fetch,
    which must not happen in this process. The states of generators do not change.
    """
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return None
    return _in_a_worker(loader, _ChosenRows(loader.dataset)) if length_of(loader.dataset) else None


def _in_a_worker(loader: DataLoader[Any], rows: Dataset[Any]) -> Any:
    """The only item of `rows`, from a temporary worker if the loader has workers; None if that fails."""
    if loader.num_workers == 0:
        return rows[0]
    probe = like_loader(loader, rows, num_workers=1, persistent_workers=False, sampler=[0])
    batches: Iterator[Any] | None = None
    try:
        batches = begin_pass(probe)
        return next(batches)
    except Exception:  # if workers can't start, the run itself will report it
        return None
    finally:
        end_pass(probe, batches)


class SharedRows(NamedTuple):
    """What a training set and an evaluation set have in common.

    Attributes:
        rows: of the evaluation set, those that are in the training set, too.
        compared: how many rows of the training set, and of the evaluation set.
    """

    rows: tuple[int, ...]
    compared: tuple[int, int]


def find_shared_rows(train: Any, evaluation: Any, most: int = 1000) -> SharedRows | None:
    """The rows that two loaders share; None if one of them is a stream.

    Of two parts of one dataset all indices are compared; otherwise the contents of up to `most` rows of each, evenly
    spaced: what a row is if it draws the same random numbers. Errors of a dataset are left to the run.
    """
    loaders = [train, evaluation]
    if not all(isinstance(each, DataLoader) and length_of(each.dataset) for each in loaders):
        return None
    parts = [_base_and_indices(each.dataset) for each in loaders]
    if parts[0][0] is parts[1][0]:
        known, keys = (indices.tolist() for _, indices in parts)
        counts, places = (len(known), len(keys)), list(range(len(keys)))
    else:
        spaced = [np.unique(np.linspace(0, len(each.dataset) - 1, most, dtype=np.int64)).tolist() for each in loaders]
        digests = [
            _in_a_worker(loader, _EachRow(loader.dataset, rows)) for loader, rows in zip(loaders, spaced, strict=True)
        ]
        if None in digests:
            return None
        (known, keys), places = digests, spaced[1]
        counts = len(known), len(keys)
    common = set(known)
    return SharedRows(tuple(place for place, key in zip(places, keys, strict=True) if key in common), counts)


def _base_and_indices(dataset: Any) -> tuple[Any, np.ndarray[Any, Any]]:
    """The dataset below nested `Subset`s, and the indices there."""
    indices = np.arange(len(dataset))
    while isinstance(dataset, Subset):
        indices = np.asarray(dataset.indices)[indices]
        dataset = dataset.dataset
    return dataset, indices


class _EachRow(Dataset[Any]):
    """One item: the hashes of the exact contents of rows, or None if one can't be fetched."""

    def __init__(self, dataset: Any, rows: Sequence[int]) -> None:
        self.dataset, self.rows = dataset, rows

    def __getitem__(self, _: int) -> list[bytes] | None:
        try:
            return [with_seed(_KEY, functools.partial(self._hash, row)) for row in self.rows]
        except Exception:
            return None

    def _hash(self, row: int) -> bytes:
        return hashlib.sha256(b";".join(_words_of(self.dataset[row], exact=True))).digest()


class _ChosenRows(Dataset[Any]):
    """One item: the hash of the first, the middle and the last row of a dataset, or None; see `Fingerprint`."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __getitem__(self, _: int) -> str | None:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # they appear again when the run fetches the row
                first, again = (with_seed(_KEY, self._hash) for _ in range(2))
            return first if first == again else None  # rows of a dataset with its own generator differ each time
        except Exception:
            return None

    def _hash(self) -> str:
        last = len(self.dataset) - 1
        digest = hashlib.sha256()
        for index in sorted({0, (last + 1) // 2, last}):
            for word in _words_of(self.dataset[index]):
                digest.update(word)
        return _finished(digest)


def _hash_of_indices(dataset: Any) -> str | None:
    digest = hashlib.sha256()
    is_subset = isinstance(dataset, Subset)
    while isinstance(dataset, Subset):
        try:
            indices = np.array([operator.index(index) for index in dataset.indices], dtype=np.int64)
            digest.update(indices.tobytes() + b";")
        except (TypeError, OverflowError):  # keys of another kind
            digest.update(repr(list(dataset.indices)).encode())
        dataset = dataset.dataset
    return _finished(digest) if is_subset else None


def _finished(digest: Any) -> str:
    return f"{_VERSION}-{digest.hexdigest()}"


def _differ(before: str | None, now: str | None) -> bool:
    """Whether two hashes of the same version differ."""
    if before is None or now is None or before == now:
        return False
    return before.partition("-")[0] == now.partition("-")[0]


def _words_of(row: Any, *, exact: bool = False) -> Iterator[bytes]:
    """The contents of a row, as bytes that are the same in every process; only the class of an opaque object.

    Floats are rounded, unless it must be `exact`.
    """
    for path, leaf in leaves_by_path(row).items():
        yield f"{path} {type(leaf).__name__}:".encode()
        if isinstance(leaf, bytes):
            yield leaf
        elif isinstance(leaf, (str, PurePath)):
            # Machines may have the same files in different folders.
            is_path = isinstance(leaf, PurePath) or ("/" in leaf and len(leaf.split(maxsplit=1)) == 1)
            yield (PurePath(leaf).name if is_path else str(leaf)).encode(errors="replace")
        elif isinstance(leaf, numbers.Integral):
            yield str(int(leaf)).encode()
        elif isinstance(leaf, (numbers.Number, torch.Tensor)) or _ARRAY_NAMES & set(dir(leaf)):
            array = _as_array(leaf)
            yield repr(array.shape).encode()
            if array.dtype.kind in "fc" and not exact:
                yield _shown_floats(array)
            elif array.dtype.kind in "biuSUfc":
                yield np.ascontiguousarray(array).tobytes()


def _as_array(value: Any) -> np.ndarray[Any, Any]:
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu()
        value = value.to_dense() if value.layout != torch.strided else value
        return (value.double() if value.is_floating_point() else value.resolve_conj()).numpy()  # type: ignore[no-any-return]
    return np.asarray(value)


def _shown_floats(array: np.ndarray[Any, Any]) -> bytes:
    """Two rounded sums over an array: the last digits of a row may depend on the model of the processor."""
    flat = array.ravel()[:_MAX_FLOATS]
    values = np.concatenate([flat.real, flat.imag]).astype(np.float64)
    is_finite = np.isfinite(values)
    values[~is_finite] = 0
    size = float(np.abs(values).sum())
    balance = float(values @ np.cos(np.arange(len(values)))) / size if size else 0
    return f"{size:.3e} {balance:.3f} {is_finite.sum()}".encode()
