"""What the mean loss of a batch is taken over, as its data tells: rows, or the weights of the targets that count."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import ConcatDataset, StackDataset, default_collate, default_convert

from pytorch_accelerated.data.rows import as_array_dataset
from pytorch_accelerated.ranks.compat.torch import version_of

_NOTHING_GIVEN = -100  # the `ignore_index` of torch's losses, if none is given
_COLUMNS = (tuple, list)
_OF_CLASSES = {nn.functional.cross_entropy, nn.functional.nll_loss}


class Counter:
    """Counts the items of a batch: what its loss is the mean of.

    Attributes:
        counts_rows: whether they are the rows of the batch.
        are_tokens: whether they are what `count_batch_items` counts, such as tokens.
    """

    counts_rows = False
    are_tokens = False

    def __call__(self, batch: Any, samples: int | None) -> Any:
        """The number of items; None if it is unknown.

        Args:
            batch: in host memory.
            samples: that the loader has put into the batch; None if it does not know.
        """
        raise NotImplementedError


class OfUser(Counter):
    """Counts with the user's `count_batch_items`."""

    are_tokens = True

    def __init__(self, count_items: Callable[[Any], Any]) -> None:
        self._count_items = count_items

    def __call__(self, batch: Any, samples: int | None) -> Any:
        """The result of the user's method."""
        return self._count_items(batch)


class RowsLeft(Counter):
    """Counts the rows of a batch, of which a `collate_fn` may have left some out."""

    counts_rows = True

    def __call__(self, batch: Any, samples: int | None) -> int | None:
        """The first dimension of all columns, if it is smaller than `samples`; else `samples`.

        It is no row where the second dimension has the samples, as in sequences that come first.
        """
        columns = list(batch.values() if isinstance(batch, Mapping) else batch if type(batch) in _COLUMNS else [batch])
        shapes = [column.shape for column in columns if isinstance(column, torch.Tensor)]
        sizes = {shape[0] if shape else None for shape in shapes}
        if samples is None or len(sizes) != 1:
            return samples
        is_nested = any(isinstance(column, (Mapping, *_COLUMNS)) for column in columns)
        (size,) = sizes
        if size is None or size >= samples or is_nested or all(shape[1:2] == (samples,) for shape in shapes):
            return samples
        return size


class TargetsThatCount(Counter):
    """Sums the weights of the targets of a batch: what `CrossEntropyLoss` and `NLLLoss` divide by.

    Their mean is sum(w[target] * loss) / sum(w[target]) over the targets other than `ignore_index`, as torch documents.
    For targets that are probabilities of classes, it is a mean over rows.

    Args:
        weight: of the classes; None: 1 for each.
        ignored: the target that does not count.
    """

    def __init__(self, weight: torch.Tensor | None, ignored: int) -> None:
        self._weight, self._ignored = weight, ignored
        self._known: tuple[int | None, torch.Tensor] | None = None

    def __call__(self, batch: Any, samples: int | None) -> Any:
        """The sum, a tensor on the device of the targets; None for a batch that is no tuple of inputs and targets."""
        targets = batch[1] if isinstance(batch, (tuple, list)) and len(batch) > 1 else None
        if not isinstance(targets, torch.Tensor) or not targets.ndim:
            return None
        if targets.is_floating_point():
            return len(targets)
        counting = targets != self._ignored
        if self._weight is None:
            return counting.sum()
        return self._weights().to(targets.device)[targets[counting].long()].sum()

    def _weights(self) -> torch.Tensor:
        """The weights in double precision, in host memory."""
        assert self._weight is not None
        version = version_of(self._weight)
        if self._known is None or self._known[0] != version:
            self._known = version, self._weight.detach().to("cpu", torch.float64)
        return self._known[1]


def counter_of(loss_func: Any, loader: Any) -> Counter | None:
    """What counts the items of a loss whose batches the default hooks use; None if they are the rows of the loader.

    Args:
        loss_func: of the trainer.
        loader: yields batches.
    """
    has_own_collate = getattr(loader, "collate_fn", None) not in (None, default_collate, default_convert)
    keywords = _arguments_of_classes(loss_func)
    if keywords is not None:
        weight, ignored = keywords.get("weight"), keywords.get("ignore_index", _NOTHING_GIVEN)
        if weight is not None or ignored != _NOTHING_GIVEN or _has_ignored(getattr(loader, "dataset", None)):
            return TargetsThatCount(weight, ignored)
    return RowsLeft() if has_own_collate else None


def _arguments_of_classes(loss_func: Any) -> Mapping[str, Any] | None:
    """`weight` and `ignore_index` of a loss of torch that divides by the weights of targets; None for others."""
    keywords: dict[str, Any] = {}
    while isinstance(loss_func, functools.partial):
        keywords = {**loss_func.keywords, **keywords}
        loss_func = loss_func.func
    if isinstance(loss_func, (nn.CrossEntropyLoss, nn.NLLLoss)):
        if type(loss_func).forward not in (nn.CrossEntropyLoss.forward, nn.NLLLoss.forward):
            return None
        return {"weight": loss_func.weight, "ignore_index": loss_func.ignore_index}
    return keywords if loss_func in _OF_CLASSES else None


def _has_ignored(dataset: Any) -> bool:
    """Whether a dataset in memory has targets of -100, which losses of torch leave out without being told."""
    if type(dataset) is ConcatDataset:
        return any(map(_has_ignored, dataset.datasets))
    if type(dataset) is StackDataset and isinstance(dataset.datasets, tuple) and len(dataset.datasets) > 1:
        targets = dataset.datasets[1]
        return isinstance(targets, torch.Tensor) and _is_ignored(targets)
    if type(dataset) is list:
        pairs = (row[1] for row in dataset if type(row) in _COLUMNS and len(row) > 1)
        return any(isinstance(each, (int, np.integer, torch.Tensor)) and _is_ignored(each) for each in pairs)
    arrays = as_array_dataset(dataset)
    data = None if arrays is None else arrays.data
    targets = data[1] if isinstance(data, (tuple, list)) and len(data) > 1 else None
    if isinstance(targets, np.ndarray):
        return targets.dtype.kind == "i" and bool((targets == _NOTHING_GIVEN).any())
    return isinstance(targets, torch.Tensor) and _is_ignored(targets)


def _is_ignored(target: Any) -> bool:
    """Whether a number or a tensor of targets has a -100."""
    if isinstance(target, torch.Tensor):
        return not target.is_floating_point() and bool((target == _NOTHING_GIVEN).any())
    return bool(target == _NOTHING_GIVEN)
