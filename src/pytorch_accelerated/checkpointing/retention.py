"""Which states to delete, as a pure function of the existing ones."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from pytorch_accelerated.errors import ConfigurationError


@dataclass(frozen=True)
class SavedState:
    """The facts about a complete state that decide whether it is kept.

    Attributes:
        name: of its folder.
        serial: its place in the order of saving, as in its manifest.
        updates: the number of updates done when it was saved.
        value: of the metric that ranks states, if known; NaN counts as unknown.
    """

    name: str
    serial: int
    updates: int
    value: float | None = None


@dataclass(frozen=True, kw_only=True)
class Retention:
    """Which states to keep: those that any rule keeps, and always the newest. Without any rule, all.

    Attributes:
        last: keep this many of the newest.
        best: keep this many with the best values; of equal ones the older.
        every_n_updates: keep the first state at or after each multiple of this.
        greater_is_better: whether the best values are the greatest.

    Raises:
        ConfigurationError: if a number is not positive.
    """

    last: int | None = None
    best: int | None = None
    every_n_updates: int | None = None
    greater_is_better: bool = False

    def __post_init__(self) -> None:
        rules = {"last": self.last, "best": self.best, "every_n_updates": self.every_n_updates}
        wrong = [f"{name}={value}" for name, value in rules.items() if value is not None and value < 1]
        if wrong:
            raise ConfigurationError(
                f"So few states cannot be kept: {', '.join(wrong)}. Give positive numbers, or None for no such rule."
            )

    def states_to_delete(self, states: Iterable[SavedState]) -> list[SavedState]:
        """Those of `states`, which must be complete, that no rule keeps; oldest first."""
        by_age = sorted(states, key=lambda state: state.serial)
        if self.last is self.best is self.every_n_updates is None:
            return []
        kept = {*by_age[-(self.last or 1) :], *self._best(by_age), *self._milestones(by_age)}
        return [state for state in by_age if state not in kept]

    def _best(self, by_age: list[SavedState]) -> list[SavedState]:
        known = [state for state in by_age if state.value is not None and not math.isnan(state.value)]
        sign = -1 if self.greater_is_better else 1
        return sorted(known, key=lambda state: sign * (state.value or 0.0))[: self.best or 0]

    def _milestones(self, by_age: list[SavedState]) -> list[SavedState]:
        first: dict[int, SavedState] = {}
        for state in by_age:
            if self.every_n_updates is not None and state.updates >= self.every_n_updates:
                first.setdefault(state.updates // self.every_n_updates, state)
        return list(first.values())
