"""Distributes the user's loaders over the ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pytorch_accelerated.data.adapting import adapt_loader
from pytorch_accelerated.data.checking import refuse_other_rows
from pytorch_accelerated.data.ordering import drawn_seed
from pytorch_accelerated.data.prefetch import device_feed
from pytorch_accelerated.data.updates import RunLoader
from pytorch_accelerated.processes.accelerators import send_to_device
from pytorch_accelerated.processes.ranks import Ranks


def distribute_loader(
    loader: Any,
    ranks: Ranks,
    *,
    seed: int,
    saved_seed: int | None,
    accumulation_steps: int,
    is_sharded: bool,
    tell: Callable[[str], None],
) -> RunLoader:
    """This rank's part of the user's `loader`. Must be called by all ranks.

    Args:
        loader: yields batches.
        ranks: the processes.
        seed: of the order of the rows, if the loader has no seed of its own.
        saved_seed: the seed in a resumed run, whatever generators are like now.
        accumulation_steps: batches of an update.
        is_sharded: whether the loader already yields only this rank's rows.
        tell: prints.
    """
    if isinstance(loader, RunLoader):
        return loader
    own_seed = ranks.from_first(drawn_seed(loader))  # on every rank, so that generators stay in step
    if saved_seed is not None:
        seed = saved_seed
    elif own_seed is not None:
        seed = own_seed
    adapted = adapt_loader(
        loader,
        ranks,
        seed=seed,
        accumulation_steps=accumulation_steps,
        feed=device_feed(ranks.device, send_to_device),
        is_sharded=is_sharded,
    )
    if adapted.announcement is not None:
        tell(adapted.announcement)
    adapted.expect_passes(1, tell)
    refuse_other_rows(adapted, ranks)
    return adapted
