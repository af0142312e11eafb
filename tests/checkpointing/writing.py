"""Writes training states without a trainer."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pytorch_accelerated.states.codec import encode
from pytorch_accelerated.states.state_folder import write_encoded


def write_state(folder: Path, facts: dict[str, Any], parts: Mapping[str, Any]) -> None:
    """A state folder with nested `parts` of any names."""
    write_encoded(folder, facts, {name: encode(value, path=name) for name, value in parts.items()})
