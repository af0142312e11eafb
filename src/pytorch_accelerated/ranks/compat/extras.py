"""Private members of optional packages: datasets, scikit-learn, torchmetrics, transformers. None is imported here."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchmetrics import Metric


def parts_of_stream(stream: Any) -> Iterator[Any]:
    """What a `datasets.IterableDataset` is made of, down to its sources; nothing public tells how it shuffles or maps.

    A version without these members yields None, which is not a part that anybody knows.
    """
    return _parts_within(getattr(stream, "_ex_iterable", None))


def division_of_stream(stream: Any) -> tuple[int, int] | None:
    """The rank and the number of ranks for which `split_dataset_by_node` has divided a `datasets.IterableDataset`."""
    division = getattr(stream, "_distributed", None)
    return None if division is None else (division.rank, division.world_size)


def _parts_within(part: Any) -> Iterator[Any]:
    yield part
    for inner in (getattr(part, "ex_iterable", None), *getattr(part, "ex_iterables", ())):
        if inner is not None:
            yield from _parts_within(inner)


def reductions_of(metric: Metric) -> Mapping[str, Any]:
    """By the name of a metric's state: the function that merges the states of multiple ranks, or None.

    Publicly it can only be given.
    """
    return metric._reductions


def set_update_count(metric: Metric, updates: int) -> None:
    """Say how many updates are in the states of `metric`, so that it computes; a cached result is forgotten.

    The public count is read-only, and loading a state dict does not change it.
    """
    metric._update_count = updates
    metric._computed = None


def unsplittable_layers(model: Any) -> Collection[str]:
    """Names of the layer classes that a model of transformers wants on one device each. They have no public name."""
    return getattr(model, "_no_split_modules", None) or ()


def function_of_scorer(scorer: Any) -> Any:
    """The metric within a scorer of scikit-learn, which has no public name; None for anything else."""
    return getattr(scorer, "_score_func", None)
