"""`notebook_launcher`, in one process."""

from typing import Any

from pytorch_accelerated import notebook_launcher
from tests.differential.scenarios.common import attempt, train, trainer


def notebook() -> Any:
    seen: list[Any] = []

    def function(first: int, second: str) -> None:
        made = train(trainer())
        seen.append([first, second, made.run_config.num_processes])

    outcome = attempt(lambda: notebook_launcher(function, (1, "b"), num_processes=1))
    return {"seen": seen, "outcome": outcome}
