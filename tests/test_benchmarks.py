"""The benchmarks run and report completely. What they measure is not looked at here."""

import json
import re
from pathlib import Path

import pytest
from benchmarks.jobs.jobs import JOBS
from benchmarks.promises.questions import QUESTIONS, ask
from benchmarks.summary import RESULTS

from pytorch_accelerated import __version__
from tests.chaos.size import in_release, some
from tests.support.processes import run_script

PROMISES = Path(__file__).parents[1] / "benchmarks" / "results" / "promises.json"
ANSWERS = json.loads(PROMISES.read_text(encoding="utf-8"))["answers"]


@in_release
@pytest.mark.processes
@pytest.mark.parametrize("library", ["ours", "ours, Hugging Face API"])
@pytest.mark.parametrize("name", ["accumulation", "resuming"])
def test_we_keep_what_the_table_says(name: str, library: str, tmp_path: Path) -> None:
    answer = ask(QUESTIONS[name], library, tmp_path / "work")
    assert answer.is_kept, answer
    assert answer.figure == ANSWERS[name][library]["figure"]


def test_the_table_of_speeds_is_of_this_version() -> None:
    facts = json.loads(RESULTS.read_text(encoding="utf-8"))
    assert facts["version"].split(".")[:2] == __version__.split(".")[:2], f"run `{facts['command']}` again"


# The guard keeps the processes that a benchmark starts from starting it once more.
RUN = """
import runpy
if __name__ == "__main__":
    runpy.run_module("benchmarks", run_name="__main__", alter_sys=True)
"""
RUN_JOBS = RUN.replace('"benchmarks"', '"benchmarks.jobs"')
# One of each kind: `python -m benchmarks --quick --no-peers` runs them all, in some minutes.
CASES = list(some(("step",), ("step", "epoch", "checkpoint", "ddp")))


GROWTH = """
import runpy
if __name__ == "__main__":
    runpy.run_module("benchmarks.growth", run_name="__main__", alter_sys=True)
"""


@in_release
@pytest.mark.processes
def test_long_runs_are_measured_at_their_beginning_and_end(tmp_path: Path) -> None:
    run_script(GROWTH, "--quick", "--output", tmp_path)
    lines = json.loads((tmp_path / "growth.json").read_text())["lines"]
    assert [line["points"][-1][0] for line in lines.values()] == [1000, 1000, 0.99, 216]
    assert (tmp_path / "growth.png").stat().st_size > 10_000


@pytest.mark.slow
@pytest.mark.processes
def test_every_way_is_in_the_json_and_in_the_tables(tmp_path):
    run_script(RUN, *CASES, "--quick", "--no-peers", "--output", tmp_path)
    found = json.loads((tmp_path / "results.json").read_text())["results"]
    assert list(found) == CASES

    written = (tmp_path / "results.md").read_text()
    rows = set(re.findall(r"^\| (.+?) \|", written, flags=re.MULTILINE))
    for tables in found.values():
        for table in tables:
            ways = set(table["rounds"])
            assert any(way.startswith("ours") for way in ways), table["title"]
            assert all(len(figures) == 1 for figures in table["rounds"].values())
            assert {target["way"] for target in table["targets"]} <= ways
            assert table["baseline"] is None or table["baseline"] in ways
            assert table["title"] in written
            assert ways <= rows


TECHNIQUES = """
import runpy
runpy.run_module("benchmarks.techniques", run_name="__main__", alter_sys=True)
"""


@in_release
@pytest.mark.processes
def test_techniques_stand_beside_plain_training_in_a_row_per_task(tmp_path):
    run_script(TECHNIQUES, "--quick", "--only", "one_cycle", "--output", tmp_path)
    found = json.loads((tmp_path / "techniques.json").read_text(encoding="utf-8"))
    assert set(found["tasks"]) == {"digits, MLP", "digits, CNN", "patches, transformer"}
    for of_task in found["tasks"].values():
        assert list(of_task) == ["plain", "`one_cycle()`"]
        assert [len(one["results"]) for one in of_task.values()] == [2, 2]

    written = (tmp_path / "techniques.md").read_text(encoding="utf-8")
    assert re.findall(r"^\| `one_cycle\(\)` \| (.+?) \|", written, flags=re.MULTILINE) == list(found["tasks"])


# With nothing but the test environment, and quickly.
JOBS_IN_TESTS = ["regression", "resume", "ema", "tensorboard", "freeze", "gan"]


@in_release
@pytest.mark.processes
def test_our_scripts_of_common_jobs_do_them(tmp_path):
    output = run_script(RUN_JOBS, *JOBS_IN_TESTS, "--only", "ours", "--output", tmp_path).stdout
    assert [line.split(":")[0] for line in output.splitlines()] == [f"{name}_ours" for name in JOBS_IN_TESTS]
    titles = [job.title for name, job in JOBS.items() if name in JOBS_IN_TESTS]
    rows = re.findall(r"^\| (.+?) \| \d+ \(\d+\) \|", (tmp_path / "jobs.md").read_text(), flags=re.MULTILINE)
    assert sorted(rows) == sorted(titles)


@in_release
@pytest.mark.processes
def test_what_is_for_a_gpu_runs_without_one_in_a_small_size(tmp_path: Path) -> None:
    run_script(RUN.replace('"benchmarks"', '"benchmarks.gpu"'), "--quick", "--output", tmp_path)
    found = json.loads((tmp_path / "results.json").read_text())
    assert list(found["results"]) == ["MLP", "saves"]
    assert found["resume, no"].endswith("the same bits")
