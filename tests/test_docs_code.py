"""The code of every page of the documentation runs as it stands."""

import os
import sys
from pathlib import Path

import pytest

from tests.support.pages import SHOWN_LANGUAGES, Block, blocks_of, script_of
from tests.support.processes import REPOSITORY, run_forked

DOCS = REPOSITORY / "docs"
# Pages in Chinese have the same code, which another test compares.
PAGES = sorted(path for path in DOCS.rglob("*.md") if not {"_build", "zh"} & set(path.relative_to(DOCS).parts))
# What a reader is told to see, beside what the page itself asserts.
SHOWN = {
    "how_to/metrics.md": "evaluation_noisy_loss",
    "how_to/tracking.md": "Logged to tensorboard: runs",
    "how_to/before_training.md": "Suggested learning rate",
    "how_to/several_processes.md": "largest_error",
    "how_to/fine_tuning.md": "(2, -1) Linear trained",
    "how_to/debugging.md": "Loss spike in epoch 3",
}


def name_of(page: Path) -> str:
    return page.relative_to(DOCS).as_posix()


def has_code(page: Path) -> bool:
    found = blocks_of(page.read_text(encoding="utf-8"))
    return any(block.reason is None and block.language not in SHOWN_LANGUAGES for block in found)


@pytest.mark.processes
@pytest.mark.parametrize("page", [page for page in PAGES if has_code(page)], ids=name_of)
def test_the_code_of_a_page_runs_as_it_stands(page: Path, tmp_path: Path) -> None:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    variables = {"PATH": path, "MPLBACKEND": "agg", "ACCELERATE_USE_CPU": "true"}
    script = script_of(page)
    assert script is not None
    output = run_forked(script, cwd=tmp_path, env=variables)
    assert SHOWN.get(name_of(page), "") in output.stdout


def test_the_blocks_of_a_page_are_found() -> None:
    text = (
        "# Page\n\n```python\na = 1\n```\n\n<!-- file: train.py -->\n```python\nprint(1)\n```\n\n- item\n\n"
        "  <!-- not run: needs Slurm -->\n  ```bash\n  srun x\n    y\n  ```\n\n```{toctree}\nx\n```\n\n"
        "````text\n```\nout\n````\n"
    )
    assert blocks_of(text) == [
        Block("python", "a = 1\n", 3, None, None),
        Block("python", "print(1)\n", 8, "train.py", None),
        Block("bash", "srun x\n  y\n", 15, None, "needs Slurm"),
        Block("text", "```\nout\n", 24, None, None),
    ]
