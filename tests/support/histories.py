"""Histories of runs that must be the same."""

from typing import Any

from pytorch_accelerated.tracking import RunHistory

_TIMES = ("seconds", "samples_per_second", "data_wait_share", "peak_memory", "ranks")


def state_without_times(history: RunHistory) -> dict[str, Any]:
    """The state of a history, without what no two runs have in common."""
    state = history.state_dict()
    state["records"] = history.records
    state["step_records"] = [
        {name: value for name, value in record._asdict().items() if name not in _TIMES}
        for record in history.step_records
    ]
    return state
