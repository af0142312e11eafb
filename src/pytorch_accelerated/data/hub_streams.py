"""Streams of the package `datasets`: which of them know their exact position, and how to resume from it."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

from pytorch_accelerated.compat.datasets import parts_of_stream

# A pass resumed from the state of these yields exactly the rest. After a shuffle buffer it does not, since the buffer
# starts empty; nor where rows are read ahead (batched functions, interleaving), which drew under an earlier key.
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
# Without a seed, numpy draws one of 128 bits, larger than any that a user would choose.
_LARGEST_SEED = 2**64


def is_hub_stream(source: Any) -> bool:
    """Whether `source` is a `datasets.IterableDataset`, whose own state is unreliable in general."""
    return any(map(_is_hub_class, type(source).__mro__))


def is_exact_hub_stream(source: Any) -> bool:
    """Whether `source` is a `datasets.IterableDataset` from whose state a pass resumes exactly.

    Unknown parts, such as subclasses and parts of other versions, count as inexact.
    """
    return _is_hub_class(type(source)) and all(map(_is_exact, parts_of_stream(source)))


def has_unseeded_order(source: Any) -> bool:
    """Whether `source` is a `datasets.IterableDataset` whose order differs in every process."""
    parts = parts_of_stream(source) if is_hub_stream(source) else ()
    return any(_is_unseeded(part.generator) for part in parts if hasattr(part, "generator"))


class HubSamples(Iterator[Any]):
    """The samples of one pass over an exact stream of `datasets`, with a position.

    They are read from a separate stream with the same rows. The user's stream would return the position of its latest
    pass, which may be that of an evaluation, and a state once loaded would also apply to later runs.

    Args:
        dataset: must be an `is_exact_hub_stream`.
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
        """The position of the pass; None if it has not started."""
        state: dict[str, Any] | None = self._start if self._samples is None else self._dataset.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Start after the sample at which `state` was taken."""
        self._start = state
        self._dataset.load_state_dict(state)


def _is_hub_class(kind: type) -> bool:
    return (kind.__module__, kind.__name__) == ("datasets.iterable_dataset", "IterableDataset")


def _is_exact(part: Any) -> bool:
    reads_ahead = getattr(part, "batched", False) or inspect.iscoroutinefunction(getattr(part, "function", None))
    return type(part).__name__ in _EXACT_PARTS and not reads_ahead


def _is_unseeded(generator: Any) -> bool:
    # These attributes are not guaranteed to exist, and a save must not fail because of a missing warning.
    entropy = getattr(getattr(getattr(generator, "bit_generator", None), "seed_seq", None), "entropy", None)
    return isinstance(entropy, int) and entropy >= _LARGEST_SEED
