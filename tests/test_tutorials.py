"""The notebooks of the tutorials run, and what is stored in them is what they show."""

import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nbformat
import pytest

from scripts import notebooks

PATHS = sorted(notebooks.NOTEBOOKS.glob("*.ipynb"))
each_notebook = pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)


def stored(path: Path) -> Any:
    return nbformat.read(path, as_version=4)


@pytest.mark.processes
@each_notebook
def test_a_notebook_runs_and_shows_what_is_stored(path: Path) -> None:
    notebook = notebooks.run(path)
    assert notebooks.problems_of(notebook) == []
    shown = zip(notebooks.kinds_of_outputs(stored(path)), notebooks.kinds_of_outputs(notebook), strict=True)
    # A busy machine may show the bar of an evaluation too.
    assert [number for number, (before, now) in enumerate(shown, start=1) if not before <= now] == []
    if path.stem == "two_processes":
        assert re.findall(r"^processes: \d$", printed(notebook), re.MULTILINE) == ["processes: 2", "processes: 1"]


def printed(notebook: Any) -> str:
    return "".join(output.get("text", "") for cell in notebooks.code_cells(notebook) for output in cell.outputs)


@each_notebook
def test_a_stored_notebook_is_as_the_script_leaves_it(path: Path) -> None:
    assert notebooks.problems_of(stored(path)) == []


def a_result(**data: Any) -> Any:
    return nbformat.v4.new_output("execute_result", data=data)


def change_code(notebook: Any) -> None:
    notebooks.code_cells(notebook)[0].source += "  # faster"


def remove_outputs(notebook: Any) -> None:
    for cell in notebooks.code_cells(notebook):
        cell.outputs = []


def fail(notebook: Any) -> None:
    error = nbformat.v4.new_output("error", ename="ValueError", evalue="no", traceback=[])
    notebooks.code_cells(notebook)[-1].outputs = [error]


def warn(notebook: Any) -> None:
    warning = nbformat.v4.new_output("stream", name="stderr", text="UserWarning: slow")
    notebooks.code_cells(notebook)[-1].outputs = [warning]


def show_a_path(notebook: Any) -> None:
    notebooks.code_cells(notebook)[-1].outputs = [a_result(**{"text/plain": "saved to /home/somebody/model.pt"})]


def show_an_address(notebook: Any) -> None:
    notebooks.code_cells(notebook)[-1].outputs = [a_result(**{"text/html": "<Figure at 0x7f468013cb50>"})]


def run_a_cell_twice(notebook: Any) -> None:
    notebooks.code_cells(notebook)[-1].execution_count += 1


def keep_versions(notebook: Any) -> None:
    notebook.metadata["toc"] = {"base_numbering": 1}


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (change_code, "Its code is not the code that its outputs came from."),
        (remove_outputs, "It has no outputs."),
        (fail, "failed with ValueError."),
        (warn, "wrote to standard error: 'UserWarning: slow'"),
        (show_a_path, "It holds '/home/somebody', of one machine."),
        (show_an_address, "It holds '0x7f468013cb50', of one machine."),
        (run_a_cell_twice, "was not run in its place"),
        (keep_versions, "It has metadata of the program that wrote it."),
    ],
)
def test_a_notebook_that_is_not_as_the_script_leaves_it_is_found(change: Callable[[Any], None], problem: str) -> None:
    notebook = copy.deepcopy(stored(PATHS[0]))
    change(notebook)
    (found,) = notebooks.problems_of(notebook)
    assert problem in found
