"""Several evaluation sets by name."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from pytorch_accelerated.data.building import check_dataset
from pytorch_accelerated.errors import ArgumentTypeError, DataError


def named_sets(dataset: Any) -> dict[str, Any]:
    """The evaluation sets that `dataset` consists of, by name, in order; none if it is a single set.

    A dict is several sets if none of its values is a tensor, an array or a dict: with these it is one set in columns.

    Raises:
        ArgumentTypeError: if a name is not a string, or empty.
    """
    is_one = not isinstance(dataset, dict) or any(
        isinstance(each, (torch.Tensor, np.ndarray)) or type(each) is dict for each in dataset.values()
    )
    if is_one:
        return {}
    for name in dataset:
        if not isinstance(name, str) or not name:
            raise ArgumentTypeError(
                f"An evaluation set is called {name!r}, but its name becomes part of the names of its metrics. Use "
                "strings that are not empty."
            )
    return dict(dataset)


def check_eval_dataset(dataset: Any, *, num_passes: int | None = 1) -> None:
    """Refuse what is neither a dataset nor a dict of datasets; see `check_dataset`."""
    sets = named_sets(dataset)
    if not sets:
        check_dataset(dataset, num_passes=num_passes)
    for name, each in sets.items():
        try:
            check_dataset(each, num_passes=num_passes)
        except (ArgumentTypeError, DataError) as error:
            raise type(error)(f"The evaluation set {name!r} cannot be used. {error}") from error
