"""The run history in saved states: what can be stored of it, and reading it without a trainer."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytorch_accelerated.checkpointing.codec import encode
from pytorch_accelerated.checkpointing.layout import Manifest
from pytorch_accelerated.checkpointing.loading import explained_loading
from pytorch_accelerated.checkpointing.policy import SavedState
from pytorch_accelerated.checkpointing.state_folder import read_state
from pytorch_accelerated.errors import CheckpointError, InvalidCheckpointError
from pytorch_accelerated.tracking.history import RunHistory, with_some_records
from pytorch_accelerated.tracking.step_records import StepRecord, records_of
from pytorch_accelerated.tracking.values import MetricRecord, records_in

if TYPE_CHECKING:
    from pytorch_accelerated.processes.ranks import Ranks


def read_metric_records(folder: Path) -> list[MetricRecord]:
    """All numbers recorded up to the save, in order. Reads only the part that has them.

    Raises:
        InvalidCheckpointError: if that part is damaged, or has no run history.
    """
    return _read_history(folder)[0]


def read_step_records(folder: Path) -> list[StepRecord]:
    """The step records up to the save; none in states from before there were any.

    Raises:
        InvalidCheckpointError: if that part is damaged.
    """
    with explained_loading("A list of step records", folder):
        return records_of(_history_of(folder).get("step_records", ()))


def _read_history(folder: Path) -> tuple[list[MetricRecord], int | None]:
    """The recorded numbers, and the number of updates that the history had counted."""
    with explained_loading("A run history", folder):
        history = _history_of(folder)
        records = [record for record in records_in(history.get("records", ())) if record.is_scalar]
        return records, history.get("updates_done")


def _history_of(folder: Path) -> Any:
    """The state of the history when the state was saved; for a resume, a cut epoch also has an earlier one."""
    _, parts = read_state(folder, ["run"])
    return parts["run"].get("ended_history", parts["run"].get("history"))


def storable_history(history: RunHistory, ranks: Ranks) -> dict[str, Any]:
    """The state of a history without values that a training state cannot hold.

    The first rank warns once about each metric with such values.
    """
    state = history.state_dict()
    records = state.get("records")
    if not isinstance(records, Mapping) or not records.get("objects"):
        return state  # a user's own history, or nothing but numbers
    reasons: dict[str, str] = {}
    keep = [True] * len(records["table"])
    for index, value in records["objects"]:
        name = records["names"][int(records["table"][index, 0])]
        try:
            encode(value, path=name)
        except CheckpointError as error:
            reasons.setdefault(name, str(error).splitlines()[1].strip())
            keep[index] = False
    new = {name: reason for name, reason in reasons.items() if name not in history.names_not_saved}
    history.names_not_saved.update(new)
    if new and ranks.is_first:
        warnings.warn(
            "Training states leave out values of "
            + ", ".join(f"the metric {name!r} ({reason})" for name, reason in new.items())
            + ". The run and its history keep them. To have them in states, record plain values, tensors or arrays.",
            stacklevel=2,
        )
    return with_some_records(state, keep) if reasons else state


def judged_states(states: Iterable[tuple[Path, Manifest]], *, metric_name: str | None) -> list[SavedState]:
    """`states` with the facts that `Retention` needs.

    The value of a state is the one recorded after its own last update. If several states have the same model (the last
    epoch is often saved as ``final`` too), only the first gets the value, so that it takes one place among the best.
    The states must be complete, in one folder, oldest first, and have `updates` among their facts.
    """
    judged: list[SavedState] = []
    seen = set()
    for folder, manifest in states:
        updates = manifest.facts["updates"]
        value = None if metric_name is None else _value_in(folder, metric_name, updates)
        judged.append(SavedState(folder.name, manifest.serial, None if (updates, value) in seen else value))
        seen.add((updates, value))
    return judged


def _value_in(folder: Path, metric_name: str, updates: int) -> float | None:
    """The last value of a metric in a saved state, if it was recorded at the state's own update."""
    try:
        records, updates_done = _read_history(folder)
    except InvalidCheckpointError:
        return None
    values = [(record.value, record.update) for record in records if record.name == metric_name]
    # A history that was not reset has counted the updates of earlier runs too.
    is_of_last_update = values and values[-1][1] == (updates if updates_done is None else updates_done)
    return values[-1][0] if is_of_last_update else None
