"""Checks that the disk has room for the training states that a run will keep."""

from __future__ import annotations

import shutil
from pathlib import Path

from pytorch_accelerated.checkpointing.reading import explained_reading, is_folder, resolved
from pytorch_accelerated.checkpointing.retention import Retention
from pytorch_accelerated.errors import CheckpointError


def check_space(save_dir: str | Path, retention: Retention, size_bytes: int) -> None:
    """Refuse a disk without room for the states, of `size_bytes` each, that `retention` keeps in `save_dir`.

    The folder need not exist yet.

    Raises:
        CheckpointError: says how much space is needed, and how much is free.
    """
    if retention.last is None and retention.best is None:
        kept, rule = 2, "at least two training states"
    else:
        # The new state is complete before an old one is deleted.
        kept = (retention.last or 0) + (retention.best or 0) + 1
        rule = f"{kept} training states, including the one being written"
    place = existing_parent(Path(save_dir))
    with explained_reading(place):
        free_bytes = shutil.disk_usage(place).free
    if kept * size_bytes > free_bytes:
        raise CheckpointError(
            f"{save_dir} needs room for {rule}: {format_size(kept * size_bytes)}, but only {format_size(free_bytes)} "
            "are free on its disk. Free some space, save elsewhere, or keep fewer states."
        )


def existing_parent(path: Path) -> Path:
    """The innermost existing folder among `path` and its parents."""
    path = resolved(path)
    return next(folder for folder in (path, *path.parents) if is_folder(folder))


def format_size(size_bytes: int) -> str:
    """A size as text: ``12.3 MB``, or ``4.5 kB`` below 0.1 MB."""
    return f"{size_bytes / 1e6:,.1f} MB" if size_bytes >= 1e5 else f"{size_bytes / 1e3:,.1f} kB"
