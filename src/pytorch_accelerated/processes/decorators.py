"""Decorators for functions that only some processes should run, or one before the others."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from pytorch_accelerated.processes.accelerators import process_state

Function = TypeVar("Function", bound=Callable[..., Any])


def local_process_zero_only(function: Function) -> Function:
    """Decorate `function` to run on the first process of each node only; the others get None at once."""
    return _only(function, "is_local_main_process")


def world_process_zero_only(function: Function) -> Function:
    """Decorate `function` to run on the first of all processes only; the others get None at once."""
    return _only(function, "is_main_process")


def _only(function: Function, condition: str) -> Function:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs) if getattr(process_state(), condition) else None

    return wrapper  # type: ignore[return-value]


def local_process_zero_first(function: Function) -> Function:
    """Decorate `function` to run on the first process of each node, then on its others. All processes must call it.

    For things that one process prepares and the others then find ready, such as a download.
    """

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        with process_state().local_main_process_first():
            return function(*args, **kwargs)

    return wrapper  # type: ignore[return-value]
