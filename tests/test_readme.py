"""What the README shows works."""

import re
from pathlib import Path

import pytest

from tests.support.pages import blocks_of, script_of
from tests.support.processes import REPOSITORY, run_forked, run_on_ranks

README = REPOSITORY / "README.md"


def first_script() -> str:
    return next(block.code for block in blocks_of(README.read_text(encoding="utf-8")) if block.language == "python")


@pytest.mark.processes
def test_the_code_of_the_readme_runs_as_it_stands(tmp_path: Path) -> None:
    look = """
from pathlib import Path
print("accuracies:", *history.get_metric_values("eval_accuracy"))
print("checkpoints:", len(list(Path("results").glob("checkpoint-*"))))
print("accuracy of the other API:", trainer.evaluate()["eval_accuracy"])
"""
    output = run_forked((script_of(README) or "") + look, cwd=tmp_path, env={"MPLBACKEND": "agg"}).stdout
    accuracies = re.search(r"^accuracies: (.*)", output, re.MULTILINE)
    assert accuracies
    assert max(map(float, accuracies[1].split())) > 0.9
    assert {"best.pt", "report.html", "curves.png"} <= {path.name for path in tmp_path.iterdir()}
    assert "No training state in states: starting afresh" in output
    assert "checkpoints: 8" in output
    other = re.search(r"other API: ([\d.]+)", output)
    assert other
    assert float(other[1]) > 0.9


@pytest.mark.processes
def test_the_first_script_runs_on_two_processes(tmp_path: Path) -> None:
    output = run_on_ranks(first_script(), 2, cwd=tmp_path)
    assert "64 samples each (32 x 2 processes)" in output.stdout_of_ranks[0]
    assert (tmp_path / "report.html").is_file()
