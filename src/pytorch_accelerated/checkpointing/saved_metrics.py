"""What the run history in a saved state says, without a trainer."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from pytorch_accelerated.checkpointing.layout import Manifest
from pytorch_accelerated.checkpointing.retention import SavedState
from pytorch_accelerated.checkpointing.state_folder import read_state
from pytorch_accelerated.errors import InvalidCheckpointError
from pytorch_accelerated.tracking.history import MetricRecord


def read_metric_records(folder: Path) -> list[MetricRecord]:
    """Every value of every metric up to the save, in the order of recording. Reads only the part that has them.

    Raises:
        InvalidCheckpointError: if that part is damaged, or no run history.
    """
    _, parts = read_state(folder, ["run"])
    try:
        return [
            MetricRecord(str(name), float(value), int(epoch), int(update))
            for name, value, epoch, update in parts["run"]["history"].get("records", ())
        ]
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise InvalidCheckpointError(
            f"The training state {folder} has no readable run history ({type(error).__name__}: {error})."
        ) from error


def judged_states(states: Iterable[tuple[Path, Manifest]], *, metric_name: str | None) -> list[SavedState]:
    """`states` as `Retention` judges them, with the values of a metric if one is given.

    A state counts with the value that was recorded after its own last update, before it was saved. Of several with the
    same model (the last epoch is often saved as ``final``, too) only the first has the value: they would take several
    places among the best.

    Args:
        states: of one folder, complete, oldest first, with `updates` among their facts.
        metric_name: of the metric; None where nobody asks for the best.
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
    """The last value of a metric in the history of a saved state, if it was recorded at the state's own update."""
    try:
        records = read_metric_records(folder)
    except InvalidCheckpointError:
        return None
    values = [(record.value, record.update) for record in records if record.name == metric_name]
    return values[-1][0] if values and values[-1][1] == updates else None
