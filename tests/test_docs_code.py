"""The code of the README and of every page of the documentation runs as it stands."""

import importlib.util
import os
import re
import sys
from pathlib import Path

import pytest

from tests.chaos.size import IS_RELEASE, in_release
from tests.support.pages import SHOWN_LANGUAGES, blocks_of, script_of
from tests.support.processes import REPOSITORY, run_forked, run_on_ranks, run_script

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
    assert "No training state in states: starting from scratch" in output
    assert "checkpoints: 8" in output
    other = re.search(r"other API: ([\d.]+)", output)
    assert other
    assert float(other[1]) > 0.9


@pytest.mark.processes
def test_the_first_script_runs_on_two_processes(tmp_path: Path) -> None:
    look = "\nassert trainer.run_history.get_latest_metric('eval_accuracy') > 0.97"
    output = run_on_ranks(first_script() + look, 2, cwd=tmp_path)
    assert "64 samples each (32 x 2 processes)" in output.stdout_of_ranks[0]


def test_the_code_of_the_guide_in_the_package_runs_as_it_stands(tmp_path: Path) -> None:
    script = script_of(REPOSITORY / "src" / "pytorch_accelerated" / "guide.md")
    assert script is not None
    look = "\nassert outputs.argmax(1).eq(targets[1400:]).float().mean() > 0.85"
    assert "Finished 5 epochs" in run_forked(script + look, cwd=tmp_path).stdout


FILE_OF_PAGE = re.compile(r"<!-- file: (\S+) -->\n```python\n(.*?)```", re.DOTALL)


@in_release
@pytest.mark.parametrize(
    ("package", "shown"), [("lightning", "val_accuracy"), ("keras", "val_loss"), ("fastai", "valid_loss")]
)
def test_the_scripts_with_the_other_package_run(package: str, shown: str, tmp_path: Path) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    files = dict(
        FILE_OF_PAGE.findall((REPOSITORY / "docs" / "coming_from" / f"{package}.md").read_text(encoding="utf-8"))
    )
    (tmp_path / "data.py").write_text(files.pop("data.py"), encoding="utf-8")
    # In one process, which is quicker.
    (tmp_path / "scripts.py").write_text("\n".join(files.values()), encoding="utf-8")
    assert shown in run_script(tmp_path / "scripts.py", cwd=tmp_path).stdout


DOCS = REPOSITORY / "docs"
# Pages in Chinese have the same code, which another test compares.
PAGES = sorted(path for path in DOCS.rglob("*.md") if not {"_build", "zh"} & set(path.relative_to(DOCS).parts))
# What a reader is told to see, beside what the page itself asserts.
SHOWN = {
    "how_to/metrics.md": "evaluation_noisy_loss",
    "how_to/tracking.md": "Logged to tensorboard: ",
    "how_to/before_training.md": "Suggested learning rate",
    "how_to/several_processes.md": "largest_error",
    "how_to/fine_tuning.md": "(2, -1) Linear trained",
    "how_to/debugging.md": "Loss spike in epoch 3",
    "how_to/programs.md": "3 discard {'lr': 1e+30",
    "how_to/spike.md": "update 4102: 240.4",
    "how_to/any_processes.md": "The runs are equal",
    "how_to/another_curve.md": "row 412: label 6 on Monday, 8 on Friday",
}


def name_of(page: Path) -> str:
    return page.relative_to(DOCS).as_posix()


# Each takes up to half a minute, and what they show has tests of its own.
LONG = (
    "how_to/another_curve.md",
    "how_to/any_processes.md",
    "how_to/branch.md",
    "how_to/eject.md",
    "how_to/images.md",
    "how_to/object_detection.md",
    "how_to/programs.md",
    "how_to/prove.md",
    "how_to/several_processes.md",
)

# One epoch shows that the code runs; `make chaos` trains as long as the page does.
SHORTENED = ("how_to/audio.md", "how_to/multi_label.md", "how_to/segmentation.md")


def has_code(page: Path) -> bool:
    found = blocks_of(page.read_text(encoding="utf-8"))
    return any(block.reason is None and block.language not in SHOWN_LANGUAGES for block in found)


@pytest.mark.processes
@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=[in_release] * (name_of(page) in LONG)) for page in PAGES if has_code(page)],
    ids=name_of,
)
def test_the_code_of_a_page_runs_as_it_stands(page: Path, tmp_path: Path) -> None:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    variables = {"PATH": path, "MPLBACKEND": "agg", "ACCELERATE_USE_CPU": "true"}
    script = script_of(page)
    assert script is not None
    if name_of(page) in SHORTENED and not IS_RELEASE:
        script, count = re.subn(r"num_epochs=\d+", "num_epochs=1", script)
        assert count
    # accelerate starts no processes where bitsandbytes has been imported, as it may have been where we fork.
    run = run_script if "notebook_launcher(" in script else run_forked
    output = run(script, cwd=tmp_path, env=variables)
    assert SHOWN.get(name_of(page), "") in output.stdout
