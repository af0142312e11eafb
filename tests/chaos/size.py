"""How much chaos: a little in every test run, all of it in `make chaos`."""

import os
from collections.abc import Sequence
from typing import TypeVar

import pytest

T = TypeVar("T")

IS_RELEASE = os.environ.get("CHAOS_SIZE") == "release"

in_release = pytest.mark.skipif(not IS_RELEASE, reason="make chaos runs it")


def size(small: int, release: int) -> int:
    """`small`, or `release` where ``CHAOS_SIZE=release`` is set."""
    return release if IS_RELEASE else small


def some(small: Sequence[T], release: Sequence[T]) -> Sequence[T]:
    """`small`, or `release` where ``CHAOS_SIZE=release`` is set."""
    return release if IS_RELEASE else small
