"""Which metrics a training run will record, as far as is known before its first update."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from pytorch_accelerated.tracking.names import name_in_set
from pytorch_accelerated.training.names import is_users_class


class ExpectedMetrics(NamedTuple):
    """Names of metrics that a run can record.

    Attributes:
        names: the known ones.
        is_complete: whether nothing else can be recorded, because no code of the user has a chance to.
        has_evaluation: whether there is an evaluation set.
    """

    names: tuple[str, ...] = ()
    is_complete: bool = True
    has_evaluation: bool = True

    def near(self, name: str, cutoff: float = 0.6) -> str:
        """A question whether one of the names that resemble `name` was meant; empty if none does."""
        return near_names(name, self.names, cutoff)


def near_names(name: str, names: Iterable[str], cutoff: float = 0.6) -> str:
    """A question whether one of the `names` that resemble `name` was meant; empty if none does."""
    near = difflib.get_close_matches(name, list(names), n=3, cutoff=cutoff)
    return f" Did you mean {' or '.join(map(repr, near))}?" if near else ""


def expected_of(callbacks: Iterable[Any], sets: Sequence[str]) -> ExpectedMetrics:
    """What `callbacks` record: those of this library say so with a method `expected_metrics`, others are unknown.

    Args:
        callbacks: of a trainer.
        sets: the names of the evaluation sets; one empty name for a single one.
    """
    names: list[str] = []
    is_complete = True
    for callback in callbacks:
        if hasattr(callback, "expected_metrics"):
            found = callback.expected_metrics(sets)
            names += found.names
            is_complete &= found.is_complete
        is_complete &= not is_users_class(type(callback))
    return ExpectedMetrics(tuple(names), is_complete)


def in_sets(names: Iterable[str], sets: Sequence[str]) -> tuple[str, ...]:
    """The names of metrics of evaluations, for each evaluation set."""
    names = list(names)
    return tuple(name_in_set(name, of_set) for of_set in sets for name in names)
