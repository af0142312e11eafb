"""How often to save, and which states to keep."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pytorch_accelerated.errors import (
    ConfigurationError,
    InvalidCheckpointError,
    MissingCheckpointError,
    explained_loading,
)
from pytorch_accelerated.facts.optional import require
from pytorch_accelerated.record.history import InMemoryRunHistory
from pytorch_accelerated.record.values import MetricRecord, records_in
from pytorch_accelerated.states.layout import Manifest
from pytorch_accelerated.states.state_folder import read_state
from pytorch_accelerated.states.verify import find_state, looks_like_state

MEASURED_FILE = "measured.json"  # next to the states of a run


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
        _require_positive(vars(self), "States cannot be saved this often")


def _require_positive(rules: Mapping[str, float | None], complaint: str) -> None:
    wrong = [f"{name}={value}" for name, value in rules.items() if value is not None and not value > 0]
    if wrong:
        raise ConfigurationError(f"{complaint}: {', '.join(wrong)}. Give positive numbers, or None for no such rule.")


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
        _require_positive({"last": self.last, "best": self.best}, "So few states cannot be kept")

    @property
    def keeps_all(self) -> bool:
        """Whether no rule is given."""
        return self.last is self.best is None

    def states_to_delete(self, values: Mapping[Path, float | None]) -> list[Path]:
        """The states that no rule keeps, oldest first.

        Args:
            values: what `judged_states` returned. NaN counts as unknown.
        """
        if self.keeps_all:
            return []
        known = {state: value for state, value in values.items() if value is not None and not math.isnan(value)}
        best = sorted(known, key=known.__getitem__, reverse=self.greater_is_better)[: self.best or 0]
        kept = {*list(values)[-(self.last or 1) :], *best}
        return [state for state in values if state not in kept]


def judged_states(states: Iterable[tuple[Path, Manifest]], *, metric_name: str | None) -> dict[Path, float | None]:
    """The values by which `Retention` ranks `states`; None where unknown.

    The value of a state is the one recorded after its own last update. If states have the same model (the last
    epoch is often saved as ``final`` too), only the first gets the value, so that it takes one place among the best.
    The states must be complete, oldest first, and have `updates` among their facts.
    """
    judged: dict[Path, float | None] = {}
    seen = set()
    for folder, manifest in states:
        updates, metrics = manifest.facts["updates"], manifest.facts.get("metrics")
        if metric_name is None or metrics is not None:
            value = None if metrics is None else metrics.get(metric_name)
        else:  # states of version 1.0 don't have this fact
            value = _value_in(folder, metric_name, updates)
        judged[folder] = None if (updates, value) in seen else value
        seen.add((updates, value))
    return judged


def _value_in(folder: Path, metric_name: str, updates: int) -> float | None:
    """The last value of a metric in a saved state, if it was recorded at the state's own update."""
    try:
        values = [record for record in read_metric_records(folder) if record.name == metric_name]
        # A history that was not reset has counted the updates of earlier runs too.
        updates = _history_in(folder).get("updates_done", updates)
    except InvalidCheckpointError:
        return None
    return values[-1].value if values and values[-1].update == updates else None


def read_metric_records(folder: Path) -> list[MetricRecord]:
    """All numbers recorded up to the save, in order. Reads only the part that has them.

    Raises:
        InvalidCheckpointError: if that part is damaged, or has no run history.
    """
    with explained_loading("A run history", folder):
        return [record for record in records_in(_history_in(folder).get("records", ())) if record.is_scalar]


def read_run_history(path: str | os.PathLike[str]) -> InMemoryRunHistory:
    """The run history in a training state, or in the newest valid one of a folder. Needs no trainer and no model.

    That of a folder has what `Trainer.measure` has added to it, too; `names_measured_afterwards` tells which.

    ::

        read_run_history("training_states").plot()

    Raises:
        MissingCheckpointError: if there is no training state.
        InvalidCheckpointError: if it is damaged, or has no such history.
    """
    folder = find_state(path)
    if folder is None:
        raise MissingCheckpointError(f"There is no training state in {path}. Check the path.")
    history = InMemoryRunHistory()
    with explained_loading("A run history", folder):
        history.load_state_dict(_history_in(folder))
    measured = Path(path) / MEASURED_FILE
    if measured.is_file() and not looks_like_state(measured.parent):
        require("pytorch_accelerated.extras.proving.measure", needed_by=MEASURED_FILE).add_measured(history, measured)
    return history


def _history_in(folder: Path) -> Any:
    """The state of the history when the state was saved; for a resume, a cut epoch also has an earlier one."""
    _, parts = read_state(folder, ["run"])
    return parts["run"].get("ended_history", parts["run"].get("history"))
