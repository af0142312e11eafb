"""The notebooks of the tutorials run, and what is stored in them is what they show."""

import re
from pathlib import Path
from typing import Any

import nbformat
import pytest

from scripts import notebooks
from tests.chaos.size import in_release

PATHS = {path.stem: path for path in sorted(notebooks.NOTEBOOKS.glob("*.ipynb"))}


def stored(path: Path) -> Any:
    return nbformat.read(path, as_version=4)


@in_release  # the pages do what they do
@pytest.mark.processes
@pytest.mark.parametrize("name", PATHS)
def test_a_notebook_runs_and_shows_what_is_stored(name: str) -> None:
    path = PATHS[name]
    notebook = notebooks.run(path)
    assert notebooks.problems_of(notebook) == []
    shown = zip(notebooks.kinds_of_outputs(stored(path)), notebooks.kinds_of_outputs(notebook), strict=True)
    # A busy machine may show the bar of an evaluation too.
    assert [number for number, (before, now) in enumerate(shown, start=1) if not before <= now] == []
    if name == "two_processes":
        assert re.findall(r"^processes: \d$", printed(notebook), re.MULTILINE) == ["processes: 2", "processes: 1"]


def printed(notebook: Any) -> str:
    return "".join(output.get("text", "") for cell in notebooks.code_cells(notebook) for output in cell.outputs)


@pytest.mark.parametrize("path", PATHS.values(), ids=PATHS)
def test_a_stored_notebook_is_as_the_script_leaves_it(path: Path) -> None:
    assert notebooks.problems_of(stored(path)) == []
