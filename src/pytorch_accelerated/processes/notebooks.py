"""Starts processes from a notebook."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import accelerate


def notebook_launcher(*args: Any, **kwargs: Any) -> None:
    """Call a function in several new processes, or in this one if `num_processes` is 1.

    It has the parameters of `accelerate.notebook_launcher`, which it calls, most often ``notebook_launcher(function,
    args=(...), num_processes=2)``. The processes are copies of this one: the function makes the trainer, and nothing
    may have used a GPU before. What it returns is lost; write results to files.
    """
    given = inspect.signature(accelerate.notebook_launcher).bind(*args, **kwargs)
    function = given.arguments["function"]

    @functools.wraps(function)
    def without_result(*args: Any) -> None:
        function(*args)  # torch would fail to send back a result that cannot be pickled

    given.arguments["function"] = without_result
    accelerate.notebook_launcher(*given.args, **given.kwargs)


notebook_launcher.__signature__ = inspect.signature(accelerate.notebook_launcher)  # type: ignore[attr-defined]
