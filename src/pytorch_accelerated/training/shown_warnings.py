"""The warnings that are shown during a run."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

_MOST_TEXTS = 100


class ShownWarnings:
    """Counts what Python's `warnings` shows in this process, so that a run can tell at its end.

    Attributes:
        count: of the warnings so far.
        texts: what the first hundred of them say.
    """

    def __init__(self) -> None:
        self.count = 0
        self.texts: list[str] = []

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        """Context in which warnings are counted. They are shown as before."""
        before = warnings.showwarning

        def show(message: Warning | str, category: type[Warning], *args: Any, **kwargs: Any) -> None:
            self.count += 1
            if len(self.texts) < _MOST_TEXTS:
                self.texts.append(f"{category.__name__}: {message}")
            before(message, category, *args, **kwargs)

        warnings.showwarning = show
        try:
            yield
        finally:
            if warnings.showwarning is show:  # somebody may have assigned another one in the meantime
                warnings.showwarning = before
