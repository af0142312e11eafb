"""The optimizer's state in a file of its own, `optimizer.pt`, which other tools read too."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pytorch_accelerated.checkpointing.portable import load_portable
from pytorch_accelerated.checkpointing.verify import read_manifest, verify
from pytorch_accelerated.errors import InvalidCheckpointError

OPTIMIZER_FILE = "optimizer.pt"


def without_callables(state: Mapping[str, Any]) -> dict[str, Any]:
    """An optimizer's state without the functions in its parameter groups, which no file holds."""
    groups = [{key: value for key, value in group.items() if not callable(value)} for group in state["param_groups"]]
    return {**state, "param_groups": groups}


def read_optimizer_file(folder: Path, optimizer: Any) -> dict[str, Any] | None:
    """The optimizer's state in a state folder, with the functions of the live `optimizer`; None if there is no file.

    Raises:
        InvalidCheckpointError: if the file is not as it was written, or holds more than tensors and plain values.
    """
    if OPTIMIZER_FILE not in {entry.name for entry in read_manifest(folder).files}:
        return None
    verify(folder, {OPTIMIZER_FILE})
    return with_callables(load_portable(folder / OPTIMIZER_FILE), optimizer)


def with_callables(state: dict[str, Any], optimizer: Any) -> dict[str, Any]:
    """The inverse of `without_callables`, with the functions of the live `optimizer`.

    Raises:
        InvalidCheckpointError: if it is no state of an optimizer.
    """
    groups = state.get("param_groups")
    if not isinstance(groups, list) or not all(isinstance(group, dict) for group in groups):
        raise InvalidCheckpointError(
            f"{OPTIMIZER_FILE} does not hold the state of an optimizer. Use another checkpoint."
        )
    live = getattr(optimizer, "param_groups", None) or []
    kept = [{key: value for key, value in group.items() if callable(value)} for group in live[: len(groups)]]
    kept += [{} for _ in groups[len(kept) :]]
    return {**state, "param_groups": [{**own, **group} for own, group in zip(kept, groups, strict=True)]}
