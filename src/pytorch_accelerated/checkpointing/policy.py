"""When to save and which states to keep: pure functions of the progress since the last save, and of the states."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from pytorch_accelerated.errors import ConfigurationError


@dataclass(frozen=True, kw_only=True)
class SavePolicy:
    """How often to save: whenever one of the rules that are not None asks for it.

    Attributes:
        every_n_updates: when the number of updates reaches a multiple of this.
        every_n_epochs: when the number of finished epochs reaches a multiple of this.
        every_n_minutes: when this much time has passed since the last save.

    Raises:
        ConfigurationError: if one of them is not positive.
    """

    every_n_updates: int | None = None
    every_n_epochs: int | None = None
    every_n_minutes: float | None = None

    def __post_init__(self) -> None:
        wrong = [f"{name}={value}" for name, value in vars(self).items() if value is not None and not value > 0]
        if wrong:
            raise ConfigurationError(
                f"States cannot be saved this often: {', '.join(wrong)}. Give positive numbers, or None for never."
            )

    def is_due(
        self, *, updates: int, epochs: int, saved_updates: int, saved_epochs: int, seconds_since_save: float
    ) -> bool:
        """Whether to save now.

        A multiple that was skipped over counts too, and the same point is never saved twice. The last three arguments
        refer to the last save, or else to the start of the run. The clocks of ranks differ, so one of them must decide.
        """
        return (
            _passed_multiple(self.every_n_updates, saved_updates, updates)
            or _passed_multiple(self.every_n_epochs, saved_epochs, epochs)
            or (self.every_n_minutes is not None and seconds_since_save >= 60 * self.every_n_minutes)
        )


def _passed_multiple(n: int | None, before: int, now: int) -> bool:
    return n is not None and now // n > before // n


@dataclass(frozen=True)
class SavedState:
    """The facts about a complete state that decide whether it is kept.

    Attributes:
        name: of its folder.
        serial: its place in the order of saving, as in its manifest.
        value: of the metric that ranks states, if known; NaN counts as unknown.
    """

    name: str
    serial: int
    value: float | None = None


@dataclass(frozen=True, kw_only=True)
class Retention:
    """Which states to keep: those that any rule keeps, and always the newest. Without any rule, all.

    Attributes:
        last: keep this many of the newest.
        best: keep this many with the best values; of equal ones the older.
        greater_is_better: whether the best values are the greatest.

    Raises:
        ConfigurationError: if a number is not positive.
    """

    last: int | None = None
    best: int | None = None
    greater_is_better: bool = False

    def __post_init__(self) -> None:
        rules = {"last": self.last, "best": self.best}
        wrong = [f"{name}={value}" for name, value in rules.items() if value is not None and value < 1]
        if wrong:
            raise ConfigurationError(
                f"So few states cannot be kept: {', '.join(wrong)}. Give positive numbers, or None for no such rule."
            )

    @property
    def keeps_all(self) -> bool:
        """Whether there is no rule."""
        return self.last is self.best is None

    def states_to_delete(self, states: Iterable[SavedState]) -> list[SavedState]:
        """Those of `states`, which must be complete, that no rule keeps; oldest first."""
        by_age = sorted(states, key=lambda state: state.serial)
        if self.keeps_all:
            return []
        kept = {*by_age[-(self.last or 1) :], *self._best(by_age)}
        return [state for state in by_age if state not in kept]

    def _best(self, by_age: list[SavedState]) -> list[SavedState]:
        known = [state for state in by_age if state.value is not None and not math.isnan(state.value)]
        sign = -1 if self.greater_is_better else 1
        return sorted(known, key=lambda state: sign * (state.value or 0.0))[: self.best or 0]
