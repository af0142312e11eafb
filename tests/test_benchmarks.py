"""The benchmarks run and report completely. What they measure is not looked at here."""

import json
import re
from pathlib import Path

import pytest

from tests.support.processes import run_script

# The guard keeps the processes that a benchmark starts from starting it once more.
RUN = """
import runpy
if __name__ == "__main__":
    runpy.run_module("benchmarks", run_name="__main__", alter_sys=True)
"""
OURS = {"ours, no callbacks", "ours, default callbacks"}
BY_HAND = {"raw loop", "accelerate by hand"}
LEAN_FACE = "ours, Hugging Face face, lean"
FACE_AS_IT_COMES = "ours, Hugging Face face, as it comes, clipped and scheduled"
BOTH_FACES = {f"ours, {face}, clipped and scheduled" for face in ("native face", "Hugging Face face, lean")}
ON_RANKS = {"raw DDP loop, ready batches", "raw DDP loop, DataLoader", "accelerate by hand, ready batches"}
MEMORY = {"ours to disk, one budget", "ours to disk, ten budgets", "ours in memory, ten budgets"}
NUMBERS_OF_WORKERS = {"raw loop, 0 workers", "raw loop, 2 workers"}
# The ways in each table of a case; in parts of about the same length. `test_further_benchmarks.py` runs the last two,
# so that two test processes can share them.
PARTS = [
    {
        "step": [BY_HAND | OURS | {LEAN_FACE}, BOTH_FACES],
        "idle": [{f"a callback {what} method for the event" for what in ("without a", "with an empty")}],
        "watched": [{"ours, default callbacks", "ours, watched"}],
        "ordinary": [BY_HAND | OURS] * 6,
    },
    {
        "epoch": [BY_HAND | OURS | {"raw loop, whole-batch indexing"}],
        "workers": [NUMBERS_OF_WORKERS | OURS] * 4,
        "face": [
            {"raw loop", LEAN_FACE},
            {"raw loop", "raw loop, clipped and scheduled", FACE_AS_IT_COMES},
            BY_HAND | OURS | {LEAN_FACE, FACE_AS_IT_COMES},
        ],
        "text": [BY_HAND | OURS | {LEAN_FACE}] * 2,
        "arrow": [BY_HAND | OURS | {LEAN_FACE}] * 4,
    },
    {
        "stream": [BY_HAND | OURS | {LEAN_FACE}] * 4,
        "loader": [{"DataLoader", "one permutation, whole-batch indexing", "ours"}],
        "long_step": [BY_HAND | OURS],
        "data_wait": [{"raw loop", "raw loop, 1 worker"} | OURS],
        "start": [*[{"raw loop", "ours, no callbacks"}] * 3, *[BY_HAND | OURS] * 3],
        "checkpoint": [
            {"torch.save", "torch.save, flushed to the disk", "ours", "ours, in the background"},
            {"ours, in the background"},
        ],
    },
    {
        "evaluation": [BY_HAND | OURS | {"raw loop, whole-batch indexing"}, {"raw loop"} | OURS],
        "prediction": [{"by hand, DataLoader", "by hand, whole-batch indexing", "ours", "ours, to disk"}, MEMORY],
        "memory": [BY_HAND | OURS, *[{"raw loop"} | OURS] * 2],
        "ddp": [ON_RANKS | OURS | {f"ours, data in memory, {which} callbacks" for which in ("no", "default")}],
    },
]


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("cases", PARTS[:2], ids=" ".join)
def test_every_way_is_in_the_json_and_in_the_tables(cases, tmp_path):
    check_results(cases, tmp_path)


def check_results(cases, tmp_path):
    """Run these cases, and assert that every way is in the JSON file and in the tables."""
    found = run_benchmarks(tmp_path, *cases)
    assert list(found) == list(cases)
    for case, tables in found.items():
        for table, ways in zip(tables, cases[case], strict=True):
            assert ways <= set(table["rounds"])

    rows = re.findall(r"^\| (.+?) \|", (tmp_path / "results.md").read_text(), flags=re.MULTILINE)
    for tables in found.values():
        for table in tables:
            assert all(len(figures) == 1 for figures in table["rounds"].values())
            assert {target["way"] for target in table["targets"]} <= set(table["rounds"])
            assert table["baseline"] is None or table["baseline"] in table["rounds"]
            assert table["title"] in (tmp_path / "results.md").read_text()
            assert set(table["rounds"]) <= set(rows)
    assert (tmp_path / "results.png").read_bytes().startswith(b"\x89PNG")


def test_every_case_is_run_here_and_explained_in_the_readme():
    benchmarks = Path(__file__).parents[1] / "benchmarks"
    cases = {file.stem for file in (benchmarks / "cases").glob("*.py")} - {"__init__"}
    assert {case for part in PARTS for case in part} == cases
    assert set(re.findall(r"^\| `(\w+)` \|", (benchmarks / "README.md").read_text(), flags=re.MULTILINE)) == cases


def run_benchmarks(folder: Path, *cases: str):
    run_script(RUN, *cases, "--quick", "--no-peers", "--output", folder)
    return json.loads((folder / "results.json").read_text())["results"]
