"""When to save, as a pure function of the progress since the last save."""

from __future__ import annotations

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
