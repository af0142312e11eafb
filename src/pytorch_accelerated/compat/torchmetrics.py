"""Private members of torchmetrics: what a metric needs to go on from a saved state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchmetrics import Metric


def reductions_of(metric: Metric) -> Mapping[str, Any]:
    """By the name of a state: the function that merges those of several ranks, or None. Publicly it is only given."""
    return metric._reductions


def set_update_count(metric: Metric, updates: int) -> None:
    """Say how many updates are in the states of `metric`, so that it computes; a cached result is forgotten.

    The public count is read-only, and loading a state dict does not change it.
    """
    metric._update_count = updates
    metric._computed = None
