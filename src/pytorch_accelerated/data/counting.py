"""What the mean loss of a batch is taken over, as its data tells: rows, or the weights of the targets that count."""

from __future__ import annotations

import dataclasses
import functools
import numbers
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import ConcatDataset, StackDataset, default_collate, default_convert

from pytorch_accelerated.data.rows import as_array_dataset
from pytorch_accelerated.errors import HookOutputError
from pytorch_accelerated.ranks.compat.torch import version_of

_NOTHING_GIVEN = -100  # the `ignore_index` of torch's losses, if none is given
_COLUMNS = (tuple, list)
_OF_CLASSES = {nn.functional.cross_entropy, nn.functional.nll_loss}


@dataclasses.dataclass(frozen=True)
class Counter:
    """Counts the items of a batch: what its loss is the mean of.

    Attributes:
        count: returns the number of items, None if it is unknown. It gets the batch, and the samples that the
            loader has put into it, None if it does not know.
        counts_rows: whether the items are the rows of the batch.
        are_tokens: whether they are what `count_batch_items` counts, such as tokens.
    """

    count: Callable[[Any, int | None], Any]
    counts_rows: bool = False
    are_tokens: bool = False

    def items_of(self, batch: Any, samples: int | None) -> int | None:
        """The number of items as a plain number, or None.

        Raises:
            HookOutputError: if the result is not a number, or below 0.
        """
        count = self.count(batch, samples)
        if type(count) is int and count >= 0:  # asked first: an abstract class takes far longer
            return count
        if isinstance(count, torch.Tensor) and count.numel() == 1:
            count = count.item()
        if count is None or (isinstance(count, numbers.Real) and not isinstance(count, bool) and float(count) >= 0):
            return count  # type: ignore[return-value]
        raise HookOutputError(
            f"`count_batch_items` returned {count!r} ({type(count).__name__}), but a batch is weighted by the number "
            "of items in its mean loss. Return a whole number of at least 0, or None if it is unknown."
        )


def rows_left(batch: Any, samples: int | None) -> int | None:
    """The rows left after a `collate_fn` that may drop some.

    They are the first dimension of all columns, if it is smaller than `samples`, except where the second dimension has
    the samples, as for sequences whose first dimension is time.
    """
    is_sequence = type(batch) in _COLUMNS  # asked first: an abstract class takes far longer
    columns = batch if is_sequence else list(batch.values()) if isinstance(batch, Mapping) else [batch]
    shapes = [column.shape for column in columns if isinstance(column, torch.Tensor)]
    sizes = [shape[0] if shape else None for shape in shapes]
    if samples in sizes or samples is None or len(set(sizes)) != 1:  # nearly always the first
        return samples
    is_nested = any(isinstance(column, (Mapping, *_COLUMNS)) for column in columns)
    size = sizes[0]
    if size is None or size >= samples or is_nested or all(shape[1:2] == (samples,) for shape in shapes):
        return samples
    return size


class TargetsThatCount:
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
        """The sum, a tensor on the device of the targets; None for a batch other than (inputs, targets)."""
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


def with_items(
    host_batches: Iterator[tuple[Any, int | None]], count_items: Counter | None
) -> Iterator[tuple[Any, int | None, int | None]]:
    """Each batch of an evaluation with its samples, and the number of its items; None without `count_items`.

    Raises:
        HookOutputError: if only some batches can be counted, so that their losses have no common mean.
    """
    were_known = None
    for batch, samples in host_batches:
        items = None if count_items is None else count_items.items_of(batch, samples)
        is_known = items is not None
        if were_known not in (None, is_known):
            raise HookOutputError(
                "`count_batch_items` returned a number for some batches of the evaluation, and None for others, so "
                "their losses have no common mean. Return a number for all of them, or for none."
            )
        were_known = is_known
        yield batch, samples, items


def counter_of(loss_func: Any, loader: Any) -> Counter | None:
    """What counts the items of a loss whose batches the default hooks use; None if they are the rows of the loader.

    Args:
        loss_func: of the trainer.
        loader: a `RunLoader`, which yields batches.
    """
    collate = loader.collate_fn
    keeps_rows = collate in (None, default_collate, default_convert) or getattr(collate, "keeps_rows", False)
    keywords = arguments_of_classes(loss_func)
    if keywords is not None:
        weight, ignored = keywords.get("weight"), keywords.get("ignore_index", _NOTHING_GIVEN)
        if weight is not None or ignored != _NOTHING_GIVEN or loader.has_ignored_targets:
            return Counter(TargetsThatCount(weight, ignored))
    return None if keeps_rows else Counter(rows_left, counts_rows=True)


def arguments_of_classes(loss_func: Any) -> Mapping[str, Any] | None:
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


def has_ignored(dataset: Any) -> bool:
    """Whether a dataset in memory has targets of -100, which losses of torch leave out without being told."""
    if type(dataset) is ConcatDataset:
        return any(map(has_ignored, dataset.datasets))
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
        return targets.dtype.kind == "i" and bool(np.any(targets == _NOTHING_GIVEN))
    return isinstance(targets, torch.Tensor) and _is_ignored(targets)


def _is_ignored(target: Any) -> bool:
    """Whether a number or a tensor of targets has a -100."""
    if isinstance(target, torch.Tensor):
        return not target.is_floating_point() and bool((target == _NOTHING_GIVEN).any())
    return bool(target == _NOTHING_GIVEN)
