"""Which metrics a training run will record, as far as is known before its first update."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from pytorch_accelerated.tracking.names import name_in_set, role_and_quantity
from pytorch_accelerated.training.names import is_users_class

_VERY_LIKE = 0.9  # "eval_f1" and "eval_f2" are less alike


class ExpectedMetrics(NamedTuple):
    """Names of metrics that a run can record.

    Attributes:
        names: the known ones.
        others: how names that are not known yet can begin; one empty text if code of the user may record any name.
        has_evaluation: whether there is an evaluation set.
    """

    names: tuple[str, ...] = ()
    others: tuple[str, ...] = ()
    has_evaluation: bool = True

    def may_have(self, name: str) -> bool:
        """Whether a metric of this name may be recorded."""
        return name in self.names or name.startswith(self.others)

    def near(self, name: str) -> str:
        """A question whether one of the names that resemble `name` was meant; empty if none does."""
        return near_names(name, self.names)

    def is_probably_a_slip(self, name: str) -> bool:
        """Whether `name` is very like one of the names, but none of them."""
        return name not in self.names and bool(difflib.get_close_matches(name, self.names, n=1, cutoff=_VERY_LIKE))


def near_names(name: str, names: Iterable[str]) -> str:
    """A question whether one of the `names` that resemble `name`, or name the same quantity, was meant; or empty."""
    names = list(names)
    near = difflib.get_close_matches(name, names, n=3)
    if not near:  # "f1" for "eval_f1"
        quantity = role_and_quantity(name.lower())[1]
        near = [other for other in names if role_and_quantity(other.lower())[1] == quantity]
    return f" Did you mean {' or '.join(map(repr, near))}?" if near else ""


def expected_of(callbacks: Iterable[Any], sets: Sequence[str]) -> ExpectedMetrics:
    """What `callbacks` record: those of this library say so with a method `expected_metrics`, others are unknown.

    Args:
        callbacks: of a trainer.
        sets: the names of the evaluation sets; one empty name for a single one.
    """
    names: list[str] = []
    others: list[str] = []
    for callback in callbacks:
        if hasattr(callback, "expected_metrics"):
            found = callback.expected_metrics(sets)
            names += found.names
            others += found.others
        if is_users_class(type(callback)):
            others.append("")
    return ExpectedMetrics(tuple(names), tuple(others))


def in_sets(names: Iterable[str], sets: Sequence[str]) -> tuple[str, ...]:
    """The names of metrics of evaluations, for each evaluation set."""
    names = list(names)
    return tuple(name_in_set(name, of_set) for of_set in sets for name in names)
