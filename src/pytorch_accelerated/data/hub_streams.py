"""Streams of the package `datasets`: which of them say exactly where they are, and how to go on from there."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

from pytorch_accelerated.compat.datasets import parts_of_stream

# Behind the state of these, everything comes again as it would have come. Not so with a shuffle buffer, which is empty
# then; nor where rows are read ahead (functions of batches, interleaving): what those drew was under an earlier key.
_EXACT_PARTS = frozenset(
    {
        "ArrowExamplesIterable",
        "ExamplesIterable",
        "FilteredExamplesIterable",
        "FormattedExamplesIterable",
        "MappedExamplesIterable",
        "RebatchedArrowExamplesIterable",
        "SelectColumnsIterable",
        "SkipExamplesIterable",
        "TakeExamplesIterable",
    }
)
# Without a seed, numpy draws one of 128 bits. Nobody types such a number.
_LARGEST_SEED = 2**64


def is_hub_stream(source: Any) -> bool:
    """Whether `source` is a `datasets.IterableDataset`. What it says of itself is not to be relied upon."""
    return any(map(_is_hub_class, type(source).__mro__))


def is_exact_hub_stream(source: Any) -> bool:
    """Whether `source` is a `datasets.IterableDataset` behind whose state a pass goes on exactly.

    What is not known to be exact is not: parts of other versions, and subclasses.
    """
    return _is_hub_class(type(source)) and all(map(_is_exact, parts_of_stream(source)))


def has_unseeded_order(source: Any) -> bool:
    """Whether `source` is a `datasets.IterableDataset` whose order is another one in every process."""
    parts = parts_of_stream(source) if is_hub_stream(source) else ()
    return any(_is_unseeded(part.generator) for part in parts if hasattr(part, "generator"))


class HubSamples(Iterator[Any]):
    """The samples of one pass over an exact stream of `datasets`, which say where they are.

    They are read from a stream of their own with the same rows: the user's would say where its latest pass is, which
    may be that of an evaluation, and once told where to begin, it would begin there in later runs, too.

    Args:
        dataset: one that `is_exact_hub_stream`.
    """

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset.shard(num_shards=1, index=0)
        self._samples: Iterator[Any] | None = None
        self._start: dict[str, Any] | None = None

    def __next__(self) -> Any:
        if self._samples is None:
            self._samples = iter(self._dataset)
        return next(self._samples)

    def state_dict(self) -> dict[str, Any] | None:
        """Where the pass is; None if it has yet to begin at the beginning."""
        state: dict[str, Any] | None = self._start if self._samples is None else self._dataset.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Begin behind the sample after which `state` was taken."""
        self._start = state
        self._dataset.load_state_dict(state)


def _is_hub_class(kind: type) -> bool:
    return (kind.__module__, kind.__name__) == ("datasets.iterable_dataset", "IterableDataset")


def _is_exact(part: Any) -> bool:
    reads_ahead = getattr(part, "batched", False) or inspect.iscoroutinefunction(getattr(part, "function", None))
    return type(part).__name__ in _EXACT_PARTS and not reads_ahead


def _is_unseeded(generator: Any) -> bool:
    # Looked for with care: nobody promises that it is there, and a save must not fail for want of a warning.
    entropy = getattr(getattr(getattr(generator, "bit_generator", None), "seed_seq", None), "entropy", None)
    return isinstance(entropy, int) and entropy >= _LARGEST_SEED
