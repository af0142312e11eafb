"""The loaders of a run."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any


@dataclasses.dataclass
class Loaders:
    """The loaders of a run. Callbacks may replace them.

    Attributes:
        train: yields batches to train on; None if the run doesn't train.
        eval: yields batches to evaluate; None if there is nothing to evaluate.
        train_kwargs: keyword arguments that `train` was made with, including defaults.
        eval_kwargs: the same for `eval`.
    """

    train: Any = None
    eval: Any = None
    train_kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    eval_kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict)
