"""Makes a `RunLoader` from anything that yields batches."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from pytorch_accelerated.data.planned_loader import PlannedLoader
from pytorch_accelerated.data.prefetch import DeviceFeed
from pytorch_accelerated.data.ready_batches import look_at_first_batch
from pytorch_accelerated.data.stream_loader import StreamLoader
from pytorch_accelerated.data.streams import is_stateful_loader
from pytorch_accelerated.data.updates import RunLoader
from pytorch_accelerated.errors import ArgumentTypeError
from pytorch_accelerated.processes.ranks import Ranks


def adapt_loader(
    loader: Any, ranks: Ranks, *, seed: int, accumulation_steps: int, feed: DeviceFeed, is_sharded: bool = False
) -> RunLoader:
    """A `RunLoader` for a torch `DataLoader` or another iterable of batches. A `RunLoader` is returned unchanged.

    `is_sharded` says that the data already gives each rank different samples. For the other arguments see `RunLoader`.

    Raises:
        ArgumentTypeError: if `loader` cannot be iterated over.
    """
    if isinstance(loader, RunLoader):
        return loader
    if not isinstance(loader, Iterable) and not hasattr(loader, "__getitem__"):
        raise ArgumentTypeError(
            f"A {type(loader).__name__} cannot be used as a loader: it cannot be iterated over. Return a DataLoader or "
            "another iterable of batches."
        )
    settings: dict[str, Any] = {"seed": seed, "accumulation_steps": accumulation_steps, "feed": feed}
    is_torch_loader = isinstance(loader, DataLoader) and (
        type(loader).__iter__ is DataLoader.__iter__ or is_stateful_loader(loader)
    )
    is_stream = is_torch_loader and isinstance(loader.dataset, IterableDataset)
    if is_torch_loader and not is_stream and loader.batch_sampler is not None:
        return PlannedLoader(loader, ranks, **settings)
    if ranks.count > 1 and not is_stream and not is_sharded and ranks.is_first:
        warnings.warn(
            f"The {type(loader).__name__} is used as it is on each of the {ranks.count} ranks, so it must yield "
            "different batches on each. Pass a map-style dataset or a torch DataLoader to have its samples distributed "
            "over the ranks, or `is_sharded=True` among the loader's arguments if it already does this.",
            stacklevel=2,
        )
    batches, announcement = look_at_first_batch(loader)
    adapted = StreamLoader(loader, ranks, batches=batches, is_sharded=is_sharded, **settings)
    adapted.announcement = announcement
    return adapted


def close_loader(loader: Any) -> None:
    """End the worker processes of `loader`, if it is one of a run."""
    if isinstance(loader, RunLoader):
        loader.close()
