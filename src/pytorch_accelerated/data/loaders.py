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
        eval: yields batches to evaluate; None if there is nothing to evaluate. Of several evaluation sets, it belongs
            to the one that is being evaluated, or else to the first.
        train_kwargs: keyword arguments that `train` was made with, including defaults.
        eval_kwargs: the same for `eval`.
        eval_sets: several evaluation sets by name, in order; empty if there is only one, which has no name.
        further_eval: `eval` and `eval_kwargs` of the sets after the first, by name.
    """

    train: Any = None
    eval: Any = None
    train_kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    eval_kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    eval_sets: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    further_eval: dict[str, tuple[Any, Mapping[str, Any]]] = dataclasses.field(default_factory=dict)

    @property
    def eval_by_name(self) -> dict[str, Any]:
        """The loaders of several evaluation sets by name, between evaluations; empty if there is only one set."""
        return {name: self.further_eval[name][0] if name in self.further_eval else self.eval for name in self.eval_sets}

    @property
    def all_eval(self) -> list[Any]:
        """The loaders of all evaluation sets, in order. Assign others to change them."""
        return [] if self.eval is None else [self.eval, *(loader for loader, _ in self.further_eval.values())]

    @all_eval.setter
    def all_eval(self, loaders: list[Any]) -> None:
        self.eval, *further = loaders
        for (name, (_, kwargs)), loader in zip(list(self.further_eval.items()), further, strict=True):
            self.further_eval[name] = loader, kwargs
