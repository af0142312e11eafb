"""Figures of matplotlib that need no display, and that notebooks show."""

from __future__ import annotations

import functools
import io
from typing import TYPE_CHECKING, Any

from pytorch_accelerated.optional import require

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def new_figure(width: float, height: float, *, needed_by: str) -> Figure:
    """An empty figure, not registered with pyplot. As the last line of a notebook's cell it is shown, without a magic.

    Args:
        width: in inches.
        height: in inches.
        needed_by: the feature that needs it, for the error.

    Raises:
        MissingDependencyError: if matplotlib is not installed.
    """
    require("matplotlib.figure", extra="plot", needed_by=needed_by)
    figure: Figure = _shown_figure_class()(figsize=(width, height), layout="constrained")
    return figure


@functools.cache
def _shown_figure_class() -> Any:
    from matplotlib.figure import Figure

    class ShownFigure(Figure):
        """A figure that notebooks display as a picture."""

        def _repr_png_(self) -> bytes:
            file = io.BytesIO()
            self.savefig(file, format="png", dpi=110)
            return file.getvalue()

        def __reduce_ex__(self, protocol: Any) -> Any:  # this class cannot be imported by its name
            reduced: Any = super().__reduce_ex__(protocol)
            return object.__new__, (Figure,), reduced[2]

    return ShownFigure
