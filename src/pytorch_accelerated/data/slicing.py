"""Limits on the number of batches, for quick trials."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Iterator
from typing import Any

from pytorch_accelerated.data.updates import RunLoader
from pytorch_accelerated.errors import ConfigurationError

LIMIT_BATCHES_ENV_VAR = "PT_ACC_LIMIT_BATCHES"


class DataLoaderSlice:
    """The first `slice_size` batches of each pass over a loader; all other attributes are the loader's.

    A slice of a `RunLoader` is a `RunLoader` too, with the limit as its `max_batches`.

    Args:
        dl: any iterable of batches.
        slice_size: the number of batches of one rank, at least 1.

    Raises:
        ConfigurationError: if `slice_size` is not a positive whole number.
    """

    def __new__(cls, dl: Any, slice_size: int) -> Any:
        """A slice, or a `RunLoader` with a limit."""
        if cls is not DataLoaderSlice or not isinstance(dl, RunLoader):
            return super().__new__(cls)
        limited: Any = dl.limited(checked_limit(slice_size, name="slice_size"))
        limited.dl, limited.slice_size = dl, slice_size  # the attributes of any other slice
        return limited

    def __init__(self, dl: Any, slice_size: int) -> None:
        self.dl = dl
        self.slice_size = checked_limit(slice_size, name="slice_size")

    def __getnewargs__(self) -> tuple[Any, int]:
        """The arguments for making a copy."""
        return self.dl, self.slice_size

    def __iter__(self) -> Iterator[Any]:
        return itertools.islice(self.dl, self.slice_size)

    def __len__(self) -> int:
        """The number of batches, at most that of the loader; a TypeError if the loader has no length."""
        return min(self.slice_size, len(self.dl))

    def __getattr__(self, name: str) -> Any:
        if name == "dl":  # not there yet: an unpickled copy, for example
            raise AttributeError(name)
        return getattr(self.dl, name)


class LimitBatches(contextlib.ContextDecorator):
    """Limits the training and evaluation batches of every trainer that is created within the block.

    Blocks may be nested: after the inner block, the outer limit applies again. The limit is stored in the environment
    variable ``PT_ACC_LIMIT_BATCHES``, which can also be set from outside; "none" means no limit.

    Args:
        num_batches: batches of one rank and epoch, at least 1.

    Raises:
        ConfigurationError: if `num_batches` is not a positive whole number.
    """

    def __init__(self, num_batches: int) -> None:
        self.num_batches = checked_limit(num_batches, name="num_batches")
        self._outer: list[str | None] = []

    def __enter__(self) -> LimitBatches:
        self._outer.append(os.environ.get(LIMIT_BATCHES_ENV_VAR))
        os.environ[LIMIT_BATCHES_ENV_VAR] = str(self.num_batches)
        return self

    def __exit__(self, *exception_info: object) -> None:
        outer = self._outer.pop()
        if outer is None:
            os.environ.pop(LIMIT_BATCHES_ENV_VAR, None)
        else:
            os.environ[LIMIT_BATCHES_ENV_VAR] = outer


def batch_limit_from_environment() -> int | None:
    """The limit in ``PT_ACC_LIMIT_BATCHES``, if any; a `ConfigurationError` if the value is invalid."""
    value = os.environ.get(LIMIT_BATCHES_ENV_VAR, "none").strip()
    if value.lower() in ("", "none"):
        return None
    return checked_limit(int(value) if value.isdigit() else value, name=LIMIT_BATCHES_ENV_VAR)


def checked_limit(limit: Any, *, name: str) -> int:
    """`limit`, if it is a positive whole number."""
    if isinstance(limit, bool) or not isinstance(limit, int) or limit < 1:
        raise ConfigurationError(
            f"{name} is {limit!r}, but it is a number of batches: a whole number of at least 1. "
            "Choose one, or leave the limit out."
        )
    return limit
