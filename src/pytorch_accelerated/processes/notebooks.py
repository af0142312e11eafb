"""Starts processes from a notebook."""

from __future__ import annotations

import contextlib
import functools
import inspect
import re
import sys
from collections.abc import Callable
from typing import Any, TextIO

import accelerate


def notebook_launcher(*args: Any, **kwargs: Any) -> None:
    """Call a function in several new processes, or in this one if `num_processes` is 1.

    It has the parameters of `accelerate.notebook_launcher`, which it calls, most often ``notebook_launcher(function,
    args=(...), num_processes=2)``. The processes are copies of this one: the function makes the trainer, and nothing
    may have used a GPU before. What it returns is lost; write results to files.
    """
    given = inspect.signature(accelerate.notebook_launcher).bind(*args, **kwargs)
    given.arguments["function"] = _WithoutResult(given.arguments["function"])
    first_line: Any = _FirstLine(sys.stdout)
    with contextlib.redirect_stdout(first_line):
        accelerate.notebook_launcher(*given.args, **given.kwargs)


notebook_launcher.__signature__ = inspect.signature(accelerate.notebook_launcher)  # type: ignore[attr-defined]


class _WithoutResult:
    """Calls a function and returns nothing: torch would fail to send back a result that cannot be pickled."""

    def __init__(self, function: Callable[..., Any]) -> None:
        functools.update_wrapper(self, function)
        self._function = function

    def __call__(self, *args: Any) -> None:
        self._function(*args)


class _FirstLine:
    """Stands in for the standard output until the first line, in which accelerate also calls CPUs "CUDAs"."""

    def __init__(self, stdout: TextIO) -> None:
        self._stdout = stdout

    def write(self, text: str) -> int:
        sys.stdout = self._stdout  # the processes that come next are copies of this one
        return self._stdout.write(re.sub(r"on (\d+) [A-Z]+s\.", r"on \1 processes.", text))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stdout, name)
