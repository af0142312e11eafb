"""Messages about files of an earlier run in the place where this run will save."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from pytorch_accelerated.checkpointing.reading import explained_reading, is_file
from pytorch_accelerated.checkpointing.space import format_size
from pytorch_accelerated.progress.formats import format_count
from pytorch_accelerated.progress.table import folded

if TYPE_CHECKING:
    from pytorch_accelerated.callbacks.base import Trainer


def tell_of_earlier_file(trainer: Trainer, path: str | Path, successor: str) -> None:
    """Print one line on each node if `path` exists, because `successor` will replace the file."""
    path = Path(path)
    if is_file(path):
        with explained_reading(path):
            facts = path.stat()
        age = f"{_time(facts.st_mtime)}, {format_size(facts.st_size)}"
        trainer.print(folded(f"{path} is from an earlier run ({age}): {successor} will replace it"))


def tell_of_earlier_states(trainer: Trainer, folder: str | Path, names: Sequence[str], fate: str) -> None:
    """Print one line if a folder that this run saves to has states or checkpoints of an earlier run.

    Args:
        trainer: the trainer of the run, which is not a resumed one.
        folder: the folder.
        names: the names of the earlier checkpoints, the newest last.
        fate: says what this run will do to them.
    """
    if names and trainer.internal_run.ranks.is_first:
        newest = Path(folder) / names[-1]
        number = format_count(len(names), "checkpoint")
        last = f"the last one: {names[-1]}, {_time(newest.stat().st_mtime)}"
        trainer.print(
            folded(f"{folder} has {number} of an earlier run ({last}). This run does not continue it, and {fate}")
        )


def _time(timestamp: float) -> str:
    return f"{datetime.fromtimestamp(timestamp):%Y-%m-%d %H:%M}"
