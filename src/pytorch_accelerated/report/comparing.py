"""``python -m pytorch_accelerated compare``: several runs on one page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pytorch_accelerated.checkpointing import disk
from pytorch_accelerated.checkpointing.publish import replacing
from pytorch_accelerated.report.page import page_of
from pytorch_accelerated.report.reading import read_run


def write_comparison(runs: Sequence[Path], output: Path) -> None:
    """Write a page that shows `runs` side by side, or the page of a single one.

    Raises:
        RunFileError: if one of them is not a record of a run.
        OSError: if the page cannot be written.
    """
    contents = [read_run(path) for path in runs]
    names = [run.name for run in contents]
    for number, run in enumerate(contents, start=1):
        if names.count(run.name) > 1:
            run.name = f"{run.name} ({number})"
    page = page_of(contents, " · ".join(run.name for run in contents))
    with replacing(output) as file:
        disk.write(file, page.encode())
