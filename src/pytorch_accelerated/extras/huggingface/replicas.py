"""A model in torch's `DataParallel`, with the outputs that it has by itself: multiple GPUs in one process."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DataParallel

from pytorch_accelerated.errors import ConfigurationError, HookOutputError
from pytorch_accelerated.facts.trees import count_rows, leaves, map_leaves, merged, parts_of


class Replicas(DataParallel[Any]):
    """Runs the replicas of a `DataParallel` on parts of a batch, and joins what they return to the output of the whole
    batch.

    Torch's own returns one loss for each replica, whose mean is not the mean of the batch unless all parts have one
    size. Here a single number is a mean weighted by the items of the parts, or by their rows if a part has no items.
    ``num_items_in_batch`` is divided alike, so that a loss may divide by it or be a mean. Lists of a batch with one
    entry for each row are cut, too. A batch with tensors of several lengths is not: one replica gets all of it.

    Attributes that it does not have are looked up in the model.

    Args:
        wrapper: which replicates and runs the model.
        count_items: of the named inputs of a part, returns how many items its loss is the mean of, or None.

    Raises:
        ConfigurationError: if the wrapper has a forward of its own, which would not be called.
    """

    def __init__(self, wrapper: DataParallel[Any], count_items: Callable[[Mapping[str, Any]], Any]) -> None:
        if not isinstance(wrapper, Replicas) and type(wrapper).forward is not DataParallel.forward:
            raise ConfigurationError(
                f"{type(wrapper).__name__}.forward would not be called: of a `DataParallel`, only `replicate` and "
                "`parallel_apply` are. Override those, or the forward of the model in it."
            )
        nn.Module.__init__(self)
        vars(self).update(vars(wrapper))
        self.replicate, self.parallel_apply = wrapper.replicate, wrapper.parallel_apply  # type: ignore[method-assign]
        self.count_items = count_items
        self._shares: list[float] = []  # of the parts in the loss of the batch

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":
                raise
            return getattr(self.module, name)

    def __reduce__(self) -> Any:  # a copy, or a file, would have the trainer in it, whose method counts items
        return copy.copy, (self.replicate.__self__,)  # type: ignore[attr-defined]

    def scatter(self, inputs: tuple[Any, ...], kwargs: dict[str, Any] | None, device_ids: Sequence[Any]) -> Any:
        """The arguments of each replica, on its device."""
        parts = _parts((inputs, kwargs or {}), len(device_ids))
        items = [self._items_in(named) for _, named in parts]
        counts = [count or 0 for count in items]
        if None in items or not any(counts):
            counts = [count_rows(part) or 1 for part in parts]
        self._shares = [count / sum(counts) for count in counts]
        for (_, named), count in zip(parts, counts, strict=True):
            if named.get("num_items_in_batch") is not None:
                named["num_items_in_batch"] = named["num_items_in_batch"] * max(count, 1) / sum(counts)
        devices = [torch.device(self.src_device_obj.type, index) for index in device_ids]
        return tuple(zip(*map(_on, parts, devices), strict=True))

    def gather(self, outputs: Any, output_device: Any) -> Any:
        """The output of the whole batch, on one device."""
        device = torch.device(self.src_device_obj.type, output_device)
        return merged(lambda parts: self._joined(parts, device), outputs, keep_mappings=True)

    def _joined(self, parts: list[Any], device: torch.device) -> Any:
        first = parts[0]
        if not all(isinstance(part, torch.Tensor) for part in parts):
            is_plain = isinstance(first, (str, int, float, type(None)))
            is_same = is_plain and all(type(part) is type(first) and part == first for part in parts)
            if is_same or hasattr(first, "get_seq_length"):  # a cache, which nobody keeps
                return first
            raise HookOutputError(
                f"What the model returned for two parts of a batch, {first!r:.100} and {parts[-1]!r:.100}, cannot be "
                "joined. Return tensors in tuples, lists or dicts, the same ones for any rows, or start one process "
                "for each GPU with torchrun."
            )
        moved = [part.to(device) for part in parts]
        if first.ndim:
            return torch.cat(moved)
        if not first.is_floating_point():
            return torch.stack(moved)
        # A mean of nothing is NaN, even multiplied by 0.
        return sum(part * share for part, share in zip(moved, self._shares, strict=True) if share)

    def _items_in(self, named: Mapping[str, Any]) -> int | None:
        try:
            count = self.count_items(named)
        except KeyError:  # it needs an entry that the model does not get
            return None
        return None if count is None else int(count)


def _parts(arguments: Any, count: int) -> list[Any]:
    """Up to `count` parts of positional and named arguments, with about as many rows each."""
    rows = count_rows(arguments)

    def containers(data: Any) -> Sequence[Any] | None:
        return None if _length(data) == rows else parts_of(data)

    lengths = {_length(leaf) for leaf in leaves(arguments, parts=containers)} - {None}
    if not rows or lengths != {rows}:
        return [(arguments[0], dict(arguments[1]))]
    size = -(-rows // count)

    def part(start: int) -> Any:
        def rows_of(leaf: Any) -> Any:
            return leaf if _length(leaf) is None else leaf[start : start + size]

        return map_leaves(rows_of, arguments, keep_mappings=True, parts=containers)

    return [part(start) for start in range(0, rows, size)]


def _on(data: Any, device: torch.device) -> Any:
    return map_leaves(
        lambda leaf: leaf.to(device) if isinstance(leaf, torch.Tensor) else leaf, data, keep_mappings=True
    )


def _length(data: Any) -> int | None:
    """The rows of a tensor, or the entries of a list; None for anything else."""
    return len(data) if isinstance(data, list) or getattr(data, "shape", None) else None
