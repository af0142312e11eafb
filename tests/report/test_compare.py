"""Runs are read back from what they have written, and compared on one page."""

import json
from pathlib import Path

import pytest

from pytorch_accelerated.__main__ import main
from pytorch_accelerated.callbacks import JSONLoggerCallback, ReportCallback, SaveTrainingStateCallback
from pytorch_accelerated.report.page import data_in
from tests.report.digits import train, trainer_with


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    """One run as a page, a folder of training states, and a log."""
    paths = [tmp_path / "run.html", tmp_path / "states", tmp_path / "log.jsonl"]
    report, states, log = ReportCallback(paths[0]), SaveTrainingStateCallback(paths[1]), JSONLoggerCallback(paths[2])
    train(trainer_with(log, report, states), 3)
    return paths


def test_each_record_of_a_run_has_its_metrics(runs: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    output = tmp_path / "new" / "compare.html"
    assert main(["compare", *map(str, runs), "--output", str(output)]) == 0
    assert capsys.readouterr().out == f"Comparison: {output}\n"
    data = data_in(output.read_text())
    assert data is not None
    page, state, log = json.loads(data)["runs"]
    assert [run["name"] for run in (page, state, log)] == ["run", "states", "log"]
    assert page["metrics"] == state["metrics"] == log["metrics"]
    assert len(page["metrics"]) == 2
    assert page["steps"] == state["steps"] == log["steps"]
    assert page["steps"]["update"][-1] == 30
    best = [[(each["name"], each["value"], each["epoch"]) for each in run["best"]] for run in (page, state, log)]
    assert best[0] == best[1] == best[2]
    assert page["config"]["num_epochs"] == 3
    assert [run["state"]["updates"] for run in (page, state, log)] == [30, 30, 30]


def test_runs_of_one_name_can_be_told_apart(runs: list[Path], tmp_path: Path):
    output = tmp_path / "compare.html"
    assert main(["compare", str(runs[0]), str(runs[0]), "--output", str(output)]) == 0
    data = data_in(output.read_text())
    assert data is not None
    assert [run["name"] for run in json.loads(data)["runs"]] == ["run (1)", "run (2)"]


@pytest.mark.parametrize(
    ("name", "content", "complaint"),
    [
        ("missing.html", None, "There is no file or folder"),
        ("other.html", "<html><body></body></html>", "contains no data"),
        (
            "cut.html",
            '<html><script id="run-data" type="application/json">{"runs": [{"na</script>',
            "not that of a run",
        ),
        (
            "types.html",
            '<html><script id="run-data" type="application/json">{"runs": [3]}</script>',
            "not that of a run",
        ),
        (
            "fields.html",
            '<html><script id="run-data" type="application/json">{"runs": [{"name": "x", "metrics": 3}]}</script>',
            "its metrics is of the type int",
        ),
        ("list.jsonl", "[1, 2]", "Line 1 of"),
        ("log.jsonl", '{"epoch": 1, "update": 3, "loss": 0.5}\n{"epoch": 1, "upd', "Line 2 of"),
        ("empty.jsonl", "", "contains no values"),
        ("weights.pt", b"\x80\x02\xff\xfe", "is not text"),
        ("folder", "a folder", "no complete training state"),
    ],
)
def test_what_is_no_run_is_rejected_with_what_may_be_one(
    name: str, content: str | bytes | None, complaint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    path = tmp_path / name
    if content == "a folder":
        path.mkdir()
    elif isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        path.write_text(content)
    assert main(["compare", str(path), "--output", str(tmp_path / "compare.html")]) == 2
    error = capsys.readouterr().err
    assert complaint in error
    assert name in error
    assert "A run is a page that ReportCallback has written" in error
    assert not (tmp_path / "compare.html").exists()


def test_a_page_that_compares_runs_is_not_one_of_them(runs: list[Path], tmp_path: Path, capsys):
    output = str(tmp_path / "compare.html")
    main(["compare", *map(str, runs), "--output", output])
    assert main(["compare", output, "--output", output]) == 2
    assert "compares 3 runs" in capsys.readouterr().err
