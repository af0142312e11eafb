"""Private members of the package `datasets`: what a stream is made of."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def parts_of_stream(stream: Any) -> Iterator[Any]:
    """What a `datasets.IterableDataset` is made of, down to its sources; nothing public tells how it shuffles or maps.

    A version without these members yields None, which is not a part that anybody knows.
    """
    return _parts_within(getattr(stream, "_ex_iterable", None))


def _parts_within(part: Any) -> Iterator[Any]:
    yield part
    for inner in (getattr(part, "ex_iterable", None), *getattr(part, "ex_iterables", ())):
        if inner is not None:
            yield from _parts_within(inner)
