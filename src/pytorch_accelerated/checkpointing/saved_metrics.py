"""The run history in saved states: what can be stored of it, and reading it without a trainer."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytorch_accelerated.checkpointing.codec import encode
from pytorch_accelerated.checkpointing.layout import Manifest
from pytorch_accelerated.checkpointing.retention import SavedState
from pytorch_accelerated.checkpointing.state_folder import read_state
from pytorch_accelerated.checkpointing.strict_json import dump_json
from pytorch_accelerated.errors import CheckpointError, InvalidCheckpointError
from pytorch_accelerated.tracking.history import RunHistory
from pytorch_accelerated.tracking.step_records import StepRecord, records_of, table_of
from pytorch_accelerated.tracking.values import MetricRecord, is_scalar

if TYPE_CHECKING:
    from pytorch_accelerated.processes.ranks import Ranks

_MAX_BYTES_OF_OBJECTS = 4 * 2**20  # of the 16 MiB of JSON that the part with the history may have


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
    _, parts = read_state(folder, ["run"])
    try:
        return records_of(parts["run"]["history"].get("step_records", ()))
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise InvalidCheckpointError(
            f"The training state {folder} has no readable step records ({type(error).__name__}: {error})."
        ) from error


def _read_history(folder: Path) -> tuple[list[MetricRecord], int | None]:
    """The recorded numbers, and the number of updates that the history had counted."""
    _, parts = read_state(folder, ["run"])
    try:
        history = parts["run"]["history"]
        records = [
            MetricRecord(str(name), float(value), int(epoch), int(update))
            for name, value, epoch, update in history.get("records", ())
            if is_scalar(value)
        ]
        return records, history.get("updates_done")
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise InvalidCheckpointError(
            f"The training state {folder} has no readable run history ({type(error).__name__}: {error})."
        ) from error


def storable_history(history: RunHistory, ranks: Ranks) -> dict[str, Any]:
    """The state of a history without values that a training state cannot hold, and with step records as a tensor.

    The first rank warns once about each metric with such values.
    """
    state = history.state_dict()
    if "step_records" in state:  # a user's own history need not have them
        state["step_records"] = table_of(history.step_records)
    records = state.get("records")
    if not isinstance(records, list) or all(is_scalar(value) for _, value, _, _ in records):
        return state  # a user's own history, or nothing but numbers
    reasons: dict[str, str] = {}
    kept, bytes_left = [], _MAX_BYTES_OF_OBJECTS
    for name, value, _, _ in records:
        size_bytes, reason = (0, None) if is_scalar(value) else _size_in_json(name, value)
        if reason is None and size_bytes > bytes_left:
            reason = "too large outside of tensors and arrays"
        if reason is not None:
            reasons.setdefault(name, reason)
        else:
            bytes_left -= size_bytes
        kept.append(reason is None)
    new = {name: reason for name, reason in reasons.items() if name not in history.names_not_saved}
    history.names_not_saved.update(new)
    if new and ranks.is_first:
        warnings.warn(
            "Training states leave out values of "
            + ", ".join(f"the metric {name!r} ({reason})" for name, reason in new.items())
            + ". The run and its history keep them. To have them in states, record plain values, tensors or arrays.",
            stacklevel=2,
        )
    return {
        **state,
        "records": [record for record, keep in zip(records, kept, strict=True) if keep],
        "read_positions": {reader: sum(kept[:end]) for reader, end in state["read_positions"].items()},
    }


def _size_in_json(name: str, value: Any) -> tuple[int, str | None]:
    """The bytes of `value` in JSON, without its tensors, or why it cannot be stored."""
    try:
        structure = encode(value, path=name).structure
        return len(dump_json(structure, what="It")), None
    except CheckpointError as error:
        lines = [line.strip() for line in str(error).splitlines()]
        return 0, lines[1] if len(lines) > 1 else lines[0]


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
        judged.append(SavedState(folder.name, manifest.serial, updates, None if (updates, value) in seen else value))
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
