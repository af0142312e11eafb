"""The benchmarks run and report completely. What they measure is not looked at here."""

import json
import re
from pathlib import Path

import pytest

from tests.chaos.size import some
from tests.support.processes import run_script

# The guard keeps the processes that a benchmark starts from starting it once more.
RUN = """
import runpy
if __name__ == "__main__":
    runpy.run_module("benchmarks", run_name="__main__", alter_sys=True)
"""
BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
# One of each kind: `python -m benchmarks --quick --no-peers` runs them all, in some minutes.
CASES = list(some(("step", "checkpoint"), ("step", "epoch", "checkpoint", "ddp")))


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


def test_every_case_is_explained_in_the_readme():
    cases = {file.stem for file in (BENCHMARKS / "cases").glob("*.py")} - {"__init__"}
    assert set(re.findall(r"^\| `(\w+)` \|", (BENCHMARKS / "README.md").read_text(), flags=re.MULTILINE)) == cases
