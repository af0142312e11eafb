"""Private members of transformers."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any


def unsplittable_layers(model: Any) -> Collection[str]:
    """Names of the layer classes that a model of transformers wants on one device each. They have no public name."""
    return getattr(model, "_no_split_modules", None) or ()
