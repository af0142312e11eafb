"""Runs the notebooks in docs/tutorials, and stores their outputs in them.

    python scripts/notebooks.py              # all of them
    python scripts/notebooks.py first_model  # one

Each runs in an empty folder, in a kernel without the user's settings. What is stored has no times of cells, versions or
paths of the machine. The tests run the notebooks as well, and fail where a stored one is not as this script leaves it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbclient
import nbformat

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = ROOT / "docs" / "tutorials"

_SECONDS = 600  # a cell that takes longer never ends
_KEY = "pytorch_accelerated"  # in the notebook's metadata
_METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}
# Paths from the root of a disk, also of Windows, and addresses of objects.
_OF_THIS_MACHINE = re.compile(
    r"(?<![\w.:/<-])/(?:Users|builds|dev|etc|home|mnt|opt|private|root|tmp|usr|var|work|workspace)/[\w.+-]+"
    r"|\b[A-Za-z]:\\+\w+|\b0x[0-9a-f]{6,}|site-packages|ipykernel_"
)


def run(path: Path) -> Any:
    """The notebook with the outputs of its cells, run from the first to the last.

    Raises:
        nbclient.exceptions.CellExecutionError: if a cell fails.
    """
    notebook = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        work = str(_made(folder, "work"))
        client = nbclient.NotebookClient(
            notebook,
            timeout=_SECONDS,
            kernel_name="python3",
            record_timing=False,
            resources={"metadata": {"path": work}},
        )
        client.execute(env=_environment(folder))
    for cell in code_cells(notebook):
        outputs = json.loads(_impersonal(json.dumps(cell.outputs), work))
        cell.outputs = [_joined(group) for group in _grouped(nbformat.from_dict(outputs))]
        cell.metadata = {name: value for name, value in cell.metadata.items() if name == "tags"}
    notebook.metadata = nbformat.from_dict({**_METADATA, _KEY: {"outputs_of": code_digest(notebook)}})
    return notebook


def problems_of(notebook: Any) -> list[str]:
    """What is wrong with a stored notebook, in sentences."""
    found = []
    cells = code_cells(notebook)
    if not any(cell.outputs for cell in cells):
        found.append("It has no outputs.")
    if notebook.metadata.get(_KEY, {}).get("outputs_of") != code_digest(notebook):
        found.append("Its code is not the code that its outputs came from.")
    if set(notebook.metadata) != {*_METADATA, _KEY} or any(set(cell.metadata) - {"tags"} for cell in notebook.cells):
        found.append("It has metadata of the program that wrote it.")
    for number, cell in enumerate(cells, start=1):
        if cell.execution_count != number:
            found.append(f"Cell {number} was not run in its place: its number is {cell.execution_count}.")
        for output in cell.outputs:
            if output.output_type == "error":
                found.append(f"Cell {number} failed with {output.ename}.")
            elif output.get("name") == "stderr":
                found.append(f"Cell {number} wrote to standard error: {output.text[:200]!r}")
    places = [_text_of(output) for cell in cells for output in cell.outputs] + [cell.source for cell in notebook.cells]
    found += [f"It holds {match[0]!r}, of one machine." for text in places for match in _OF_THIS_MACHINE.finditer(text)]
    return found


def code_cells(notebook: Any) -> list[Any]:
    """The cells with code."""
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def code_digest(notebook: Any) -> str:
    """A short digest of the code of all cells."""
    code = "\0".join(cell.source for cell in code_cells(notebook))
    return hashlib.sha256(code.encode()).hexdigest()[:16]


def kinds_of_outputs(notebook: Any) -> list[set[tuple[str, ...]]]:
    """The kinds of the outputs of each cell, such as printed text, and a picture with the text in its place."""
    return [
        {(output.output_type, *sorted(output.get("data", ()))) for output in cell.outputs}
        for cell in code_cells(notebook)
    ]


def _environment(folder: str) -> dict[str, str]:
    """Of a kernel that has this checkout, and no settings of the user."""
    # The last one lets torchvision, which transformers imports, be imported where it was built for another torch.
    path = os.pathsep.join(map(str, [ROOT / "src", ROOT, ROOT / "tests" / "support"]))
    return {
        **os.environ,
        "PATH": os.pathsep.join(
            [str(Path(sys.executable).parent), os.environ.get("PATH", "")]
        ),  # `!python` is this one
        "PYTHONPATH": path,
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",  # which are widgets, and a stored notebook has none
        "OMP_NUM_THREADS": "1",  # the quickest for models as small as these, even on a busy machine
        "IPYTHONDIR": str(_made(folder, "ipython")),
        "MPLCONFIGDIR": str(_made(folder, "matplotlib")),
    }


def _impersonal(text: str, folder: str) -> str:
    """The text without the folder of the run and the name of this machine, which reports of runs show."""
    return re.sub(rf"\b{re.escape(platform.node())}\b", "laptop", text.replace(folder, "tutorial"))


def _made(folder: str, name: str) -> Path:
    path = Path(folder, name)
    path.mkdir()
    return path


def _grouped(outputs: list[Any]) -> Iterator[list[Any]]:
    """Printed text arrives in pieces, cut by chance: those of one stream that follow each other are a group."""
    group: list[Any] = []
    for output in outputs:
        if group and (output.output_type != "stream" or group[0].get("name") != output.get("name")):
            yield group
            group = []
        group.append(output)
    if group:
        yield group


def _joined(group: list[Any]) -> Any:
    if group[0].output_type == "stream":
        group[0].text = "".join(each.text for each in group)
    return group[0]


def _text_of(output: Any) -> str:
    """All text of an output; pictures are none."""
    data = output.get("data", {})
    return "\n".join([output.get("text", ""), *(str(value) for kind, value in data.items() if kind[:6] != "image/")])


def main(names: list[str]) -> int:
    paths = [NOTEBOOKS / f"{name}.ipynb" for name in names] or sorted(NOTEBOOKS.glob("*.ipynb"))
    problems = []
    for path in paths:
        print(path.name, flush=True)
        notebook = run(path)
        nbformat.write(notebook, path)
        problems += [f"{path.name}: {problem}" for problem in problems_of(notebook)]
    print(*problems, sep="\n", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="names of notebooks; default: all")
    sys.exit(main(parser.parse_args().names))
