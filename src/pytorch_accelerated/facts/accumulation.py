"""How the batches of an epoch are divided into updates."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any


@dataclasses.dataclass(frozen=True)
class Accumulation:
    """How many batches of a rank each update of an epoch has, except for the last, which takes the rest.

    Another rule than the same number for all updates of an epoch would change this class alone. A rule that depends on
    the epoch also needs it where updates are counted: `data/updates.py` and `create_run_config`.

    Args:
        steps: batches of a rank per update.
    """

    steps: int = 1

    @classmethod
    def of(cls, arguments: Any) -> Accumulation:
        """What a run's settings, its config or the arguments of the Hugging Face trainer ask for."""
        return cls(arguments.gradient_accumulation_steps or 1)

    def sizes(self, batches_done: int = 0) -> Iterator[int]:
        """The batches of each update, without end, after `batches_done` batches of the epoch."""
        return itertools.repeat(self.steps)

    def batches(self, updates: int) -> int:
        """The batches in the first `updates` updates of an epoch."""
        return updates * self.steps

    def updates(self, batches: int) -> int:
        """The updates of an epoch with so many batches."""
        return -(-batches // self.steps)
