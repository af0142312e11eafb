"""Rows of several datasets in given proportions, in an order that a trainer asks the dataset for."""

from __future__ import annotations

import functools
import heapq
import math
import numbers
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from pytorch_accelerated.data.rows import as_array_dataset
from pytorch_accelerated.data.sampling import epoch_order
from pytorch_accelerated.errors import ConfigurationError
from pytorch_accelerated.facts.seeding import mixed_seed
from pytorch_accelerated.facts.settings import check_positive_count

_LONGEST_PATTERN = 2**20  # rows; it is found row by row, in about a second


class Mixture(Dataset[Any]):
    """Multiple map-style datasets as one, whose rows come in given proportions in training.

    ::

        trainer.train(Mixture([web, books, code], [0.7, 0.2, 0.1]), num_epochs=1)

    As a dataset it has the rows of all datasets, one dataset after the other, as a `ConcatDataset`; these are the
    indices of `Trainer.rows_of` and ``leave_out``. Evaluations read each row once. Training that shuffles reads them in
    the order of `order`: in every part of an epoch from its beginning, each dataset has its share, to less than one
    row. Within a dataset, rows are shuffled by seed and epoch. If a dataset is used up, it begins again in a new order,
    so a row may come several times in an epoch. A sampler of your own, and ``shuffle=False``, take precedence.

    Args:
        datasets: map-style datasets; also tensors or arrays, or tuples and dicts of them.
        weights: a number above 0 for each dataset: its share of the rows. They need not add up to 1. Shares are exact
            if they have a common denominator of up to 2**20. Others are rounded to multiples of 2**-20, and then
            divided by their sum: of n datasets, each share is off by at most (n + 1) / 2 * 2**-20.
        rows: of an epoch, over all ranks. None: as many as there are before the first row would be repeated.

    Attributes:
        datasets: the datasets.
        weights: their shares, which add up to 1.

    Raises:
        ArgumentTypeError: if `rows` is not a whole number.
        ConfigurationError: for an empty dataset, or one that is not map-style; a weight that is not above 0; too
            few or too many weights; no rows.
    """

    def __init__(self, datasets: Sequence[Any], weights: Sequence[float], *, rows: int | None = None) -> None:
        arrays = [as_array_dataset(each) for each in datasets]
        self.datasets = [each if found is None else found for each, found in zip(datasets, arrays, strict=True)]
        # The index of the first row of each dataset, and that after the last row.
        self._starts = np.cumsum([0, *map(_checked_length, self.datasets)], dtype=np.int64)
        self._counts = _whole_weights(len(self.datasets), weights)
        self.weights = [count / sum(self._counts) for count in self._counts]
        if rows is not None:
            check_positive_count("rows", rows)
        self._rows = rows

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __getitem__(self, index: int) -> Any:
        return self.__getitems__([range(len(self))[index]])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """The rows at these indices; one call for each dataset, if it has this method too."""
        which = np.searchsorted(self._starts, indices, side="right") - 1
        rows: list[Any] = [None] * len(indices)
        for number in np.unique(which):
            dataset, places = self.datasets[number], np.flatnonzero(which == number).tolist()
            own = [int(indices[place] - self._starts[number]) for place in places]
            fetch_many = getattr(dataset, "__getitems__", None)
            found = [dataset[index] for index in own] if fetch_many is None else fetch_many(own)
            for place, row in zip(places, found, strict=True):
                rows[place] = row
        return rows

    @functools.cached_property
    def rows(self) -> int:
        """The number of rows of an epoch, over all ranks."""
        if self._rows is not None:
            return self._rows
        ends = []
        for number, dataset in enumerate(self.datasets):
            places = np.flatnonzero(self._pattern == number)
            if len(places):
                times, rest = divmod(len(dataset), len(places))
                ends.append(times * len(self._pattern) + int(places[rest]))
        return min(ends)

    def order(self, *, seed: int, epoch: int) -> torch.Tensor:
        """The indices of an epoch in the order of training: int64, `rows` of them, the same in every process."""
        which, order = np.resize(self._pattern, self.rows), np.empty(self.rows, dtype=np.int64)
        for number, dataset in enumerate(self.datasets):
            places = np.flatnonzero(which == number)
            seeds = [mixed_seed("mixture", seed, number, times) for times in range(-(-len(places) // len(dataset)))]
            own = [epoch_order(len(dataset), seed=each, epoch=epoch).numpy() for each in seeds]
            order[places] = self._starts[number] + np.concatenate([*own, places[:0]])[: len(places)]
        return torch.from_numpy(order)

    @functools.cached_property
    def _pattern(self) -> np.ndarray[Any, np.dtype[np.int32]]:
        """The number of the dataset of each row, up to where the pattern repeats, or as far as it is needed.

        The rows of a dataset have their windows: the j-th comes where its share reaches j - 1 at the earliest, and j at
        the latest. Of the datasets whose window has begun, it is the turn of the one whose window ends first. That
        keeps all windows, unlike picking the one furthest behind. Source: Tijdeman, The chairman assignment
        problem, Discrete Mathematics 32, 1980.
        """
        counts, total = self._counts, sum(self._counts)
        needed = int(self._starts[-1]) + 1 if self._rows is None else self._rows
        given, pattern = [0] * len(counts), []
        waiting, begun = [(1, number) for number in range(len(counts))], list[tuple[int, int]]()
        for position in range(1, min(total, needed) + 1):
            while waiting and waiting[0][0] <= position:
                _, number = heapq.heappop(waiting)
                heapq.heappush(begun, (-(-(given[number] + 1) * total // counts[number]), number))
            _, number = heapq.heappop(begun)
            given[number] += 1
            heapq.heappush(waiting, (given[number] * total // counts[number] + 1, number))
            pattern.append(number)
        return np.array(pattern, dtype=np.int32)


def _checked_length(dataset: Any) -> int:
    """The number of rows of a dataset that can be mixed."""
    if not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__") and len(dataset)):
        raise ConfigurationError(
            f"A {type(dataset).__name__} cannot be mixed: it has no rows that are known by number. Pass datasets with "
            "`__getitem__` and `__len__`, none of them empty, and mix streams with their own library."
        )
    return len(dataset)


def _whole_weights(datasets: int, weights: Sequence[float]) -> list[int]:
    """Weights as whole numbers, whose sum is about `_LONGEST_PATTERN` or less."""
    if not datasets or datasets != len(weights):
        raise ConfigurationError(f"There are {datasets} datasets to mix, and {len(weights)} weights: give each one.")
    for weight in weights:
        if not isinstance(weight, numbers.Real) or not 0 < float(weight) < math.inf:
            raise ConfigurationError(f"The weight {weight!r} is not a number above 0: give one, or leave the set out.")
    total = sum(Fraction(float(weight)) for weight in weights)
    shares = [(Fraction(float(weight)) / total).limit_denominator(_LONGEST_PATTERN) for weight in weights]
    common = math.lcm(*(share.denominator for share in shares)) if all(shares) else _LONGEST_PATTERN
    return [max(1, round(share * min(common, _LONGEST_PATTERN))) for share in shares]
