"""What a run has logged, as a table that grows, and how the run ended."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from pytorch_accelerated.callbacks.summing_up import best_facts, saved_lines, with_mark
from pytorch_accelerated.huggingface.events.callbacks import RunEnd
from pytorch_accelerated.progress.formats import format_count, format_duration, format_number, format_rate
from pytorch_accelerated.progress.table import GrowingTable, folded
from pytorch_accelerated.tracking.logged import LoggedHistory, is_about_the_run, is_summary

_SHORT_NAMES = {"learning_rate": "lr"}


class LogTable:
    """A table with a row for each step that has logs; those of an evaluation are in the row of its step.

    Args:
        watched: the metric that says which model is the best, and whether greater is better. Without any, it is the
            loss of evaluations.
        earlier: the log history of a run that is resumed.
    """

    def __init__(self, watched: Mapping[str, bool], earlier: Iterable[Mapping[str, Any]] = ()) -> None:
        self.watched = watched
        earlier = list(earlier)
        self.history = LoggedHistory(earlier)
        self._table = GrowingTable(minor_names=("grad_norm", "lr", "elapsed"))
        names = {_SHORT_NAMES.get(name, name): None for entry in earlier for name in entry if not is_summary(entry)}
        if names:
            self._table.expect("epoch", ["step", *(name for name in names if not is_about_the_run(name))])
        self._row: dict[str, str] = {}

    def add(self, logs: Mapping[str, Any], epoch: float, step: int, seconds: float) -> list[str]:
        """Add logs to the row of their step. Returns the row before, if this begins another one."""
        place = {"epoch": format_epochs(epoch), "step": str(step)}
        cells = {_SHORT_NAMES.get(name, name): _text(name, logs[name]) for name in logs if not is_about_the_run(name)}
        is_same = place.items() <= self._row.items() and not cells.keys() & self._row.keys()
        finished = [] if is_same else self.take_row()
        self._row = {**(self._row or place), **cells, "elapsed": format_duration(seconds)}
        self.history.add(logs, epoch, step)
        return finished

    @property
    def has_row(self) -> bool:
        """Whether a row has begun that nobody has taken."""
        return bool(self._row)

    def take_row(self) -> list[str]:
        """The row that has begun, as text; none if there is none. A "*" follows a new best value."""
        row, self._row = self._row, {}
        return [self._table.add_row(with_mark(row, self.history.records, self.watched))] if row else []

    def closing_lines(
        self, state: Any, seconds: float, speed: float | None, saved: Mapping[str, str], end: RunEnd
    ) -> list[str]:
        """How the run ended, its best value and its speed, and what it saved where.

        Args:
            state: of the trainer.
            seconds: the duration.
            speed: in samples a second, if known.
            saved: the names of what was saved, by path.
            end: what else is known about the end.
        """
        word = "Finished" if state.global_step >= state.max_steps else "Stopped early after"
        epochs = format_epochs(state.epoch)
        left_out = sum(int(entry.get("non_finite_losses", 0)) for entry in state.log_history)
        facts = best_facts(self.history.records, self.watched, names_step=True)
        facts += [] if speed is None else [f"{format_rate(speed)} samples/s"]
        facts += [f"{format_count(left_out, 'loss', 'losses')} left out as not finite"] if left_out else []
        facts += [format_count(end.num_warnings, "warning")] if end.num_warnings else []
        done = f"{epochs} {'epoch' if epochs == '1' else 'epochs'}, {format_count(state.global_step, 'step')}"
        done += f" ({end.skipped_updates} skipped)" if end.skipped_updates else ""
        reason = f": {end.reason}" if end.reason else ""
        lines = [f"{word} {done} in {format_duration(seconds)}{reason}", ", ".join(facts)]
        return [*(folded(line) for line in lines if line), *saved_lines(saved)]


def format_epochs(epochs: float) -> str:
    """A number of epochs, without decimals if it is whole.

    >>> format_epochs(2.0), format_epochs(0.5)
    ('2', '0.50')
    """
    text = f"{epochs:.2f}"
    return text.removesuffix(".00")


def _text(name: str, value: Any) -> str:
    if name == "learning_rate" and isinstance(value, float):
        return f"{value:.2e}"
    return format_number(value) if isinstance(value, float) else str(value)
