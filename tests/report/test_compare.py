"""Runs are read back from what they have written, and compared on one page."""

import json
from pathlib import Path

import pytest

from pytorch_accelerated.callbacks import (
    ReportCallback,
    ResultCallback,
    SaveTrainingStateCallback,
)
from pytorch_accelerated.extras.report.contents import data_in
from tests.report.digits import train, trainer_with
from tests.support.tool import run_tool


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    """One run as a page and a folder of training states."""
    paths = [tmp_path / "run.html", tmp_path / "states"]
    train(trainer_with(ReportCallback(paths[0]), SaveTrainingStateCallback(paths[1])), 3)
    return paths


def test_each_record_of_a_run_has_its_metrics_and_a_name_of_its_own(
    runs: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    output = tmp_path / "new" / "compare.html"
    assert run_tool("compare", *runs, runs[0], "--output", output) == 0
    assert capsys.readouterr().out == f"Comparison: {output}\n"
    data = data_in(output.read_text())
    assert data is not None
    page, state, again = json.loads(data)["runs"]
    assert [run["name"] for run in (page, state, again)] == ["run (1)", "states", "run (3)"]
    assert page["metrics"] == state["metrics"]
    assert len(page["metrics"]) == 2
    assert page["steps"] == state["steps"]
    assert page["steps"]["update"][-1] == 30
    best = [[(each["name"], each["value"], each["epoch"]) for each in run["best"]] for run in (page, state)]
    assert best[0] == best[1]
    assert page["config"]["num_epochs"] == 3
    assert [run["state"]["updates"] for run in (page, state)] == [30, 30]


def test_comparing_a_folder_of_one_run_twice_makes_no_second_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    train(trainer_with(ReportCallback("run.html")), 1)
    assert [run_tool("compare", "."), run_tool("compare", ".")] == [0, 0]
    capsys.readouterr()
    assert run_tool("runs", ".", "--json") == 0
    assert [run["path"] for run in json.loads(capsys.readouterr().out)["runs"]] == ["run.html"]


DAMAGED = "what it holds is damaged, or of another kind"
DEEP = "[" * 100_000 + "]" * 100_000


def page_with(runs: str) -> str:
    return f'<html><script id="run-data" type="application/json">{{"runs": {runs}}}</script>'


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("missing.html", None, "there is no such file or folder"),
        ("other.html", "<html><body></body></html>", "the file has no data of a run in it"),
        ("fields.html", page_with('[{"name": "x", "metrics": 3}]'), DAMAGED),
        ("best.html", page_with('[{"name": "x", "best": [{"name": "loss"}]}]'), DAMAGED),
        ("bests.html", page_with('[{"name": "x", "best": [3]}]'), DAMAGED),
        *((f"deep_{d}.html", page_with(f'[{{"name": {"[" * d + "]" * d}}}]'), DAMAGED) for d in (400, 100_000)),
        ("epochs/trainer_state.json", '{"log_history": [{"epoch": 1e400, "loss": 1}], "global_step": 1}', DAMAGED),
        ("deep/trainer_state.json", f'{{"log_history": {DEEP}}}', DAMAGED),
        ("weights.pt", b"\x80\x02\xff\xfe", DAMAGED),
        ("folder", "a folder", "the folder has no run in it"),
    ],
)
def test_what_is_no_run_is_rejected_with_what_may_be_one(
    name: str, content: str | bytes | None, reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    if content == "a folder":
        path.mkdir()
    elif isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        path.write_text(content)
    assert run_tool("compare", path, "--output", tmp_path / "compare.html") == 2
    error = capsys.readouterr().err
    assert f"{path} is not a record of a run: {reason}. A run is a page of ReportCallback" in error
    assert not (tmp_path / "compare.html").exists()


def test_a_page_that_compares_runs_is_not_one_of_them(runs: list[Path], tmp_path: Path, capsys):
    output = str(tmp_path / "compare.html")
    run_tool("compare", *runs, "--output", output)
    assert run_tool("compare", output, "--output", tmp_path / "other.html") == 2
    assert "compares 2 runs" in capsys.readouterr().err


def test_a_comparison_never_replaces_one_of_its_runs(runs: list[Path], tmp_path: Path, capsys):
    (tmp_path / "link.html").symlink_to(runs[0])
    before = runs[0].read_bytes()
    for output in (runs[0], tmp_path / "link.html", tmp_path / "states" / ".." / "run.html"):
        assert run_tool("compare", *runs, "--output", output) == 2
        assert "would replace" in capsys.readouterr().err
    assert runs[0].read_bytes() == before


def test_a_folder_of_runs_is_compared_with_the_best_run_first(tmp_path: Path):
    folder = tmp_path / "runs"
    for name, num_epochs in (("b", 1), ("a", 3), ("deep/er/c", 2)):
        report, states = ReportCallback(folder / name / "report.html"), SaveTrainingStateCallback(folder / name / "s")
        train(trainer_with(report, states), num_epochs)
    train(trainer_with(SaveTrainingStateCallback(folder / "states only")), 4)
    train(trainer_with(ReportCallback(folder / "more" / "page.html")), 5)
    (folder / "other.html").write_text("<html></html>")
    (folder / "empty").mkdir()
    for output in ("compare.html", "again.html"):  # a comparison in the folder is not a run
        assert run_tool("compare", folder, "--output", folder / output) == 0
    data = data_in((folder / "again.html").read_text())
    assert data is not None
    runs = json.loads(data)["runs"]
    assert [run["name"] for run in runs] == ["page", "states only", "a", "c", "b"]
    values = [best["value"] for run in runs for best in run["best"] if best["name"] == "eval_loss_epoch"]
    assert values == sorted(values)


def test_a_comparison_takes_the_runs_that_the_ranking_lists(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Folders, pages, results and states, one of them damaged, alone and together."""
    for name in ("a", "b"):
        train(
            trainer_with(ReportCallback(tmp_path / name / "page.html"), ResultCallback(tmp_path / name / "result.json"))
        )
    train(trainer_with(ResultCallback(tmp_path / "c" / "result.json"), SaveTrainingStateCallback(tmp_path / "c" / "s")))
    for name in ("d", "e"):
        (tmp_path / name).mkdir()
    (tmp_path / "d" / "result.json").write_text("{")

    def compared(*places: Path) -> list[str]:
        assert run_tool("compare", *places, "--output", tmp_path / "out" / "page.html", "--json") == 0
        found = json.loads(capsys.readouterr().out)
        assert all("d is not a record of a run" in each for each in found["left_out"])
        runs = json.loads(data_in(Path(found["output"]).read_text()) or "")["runs"]
        return [run["source"] for run in runs] + [str(tmp_path / "d")] * len(found["left_out"])

    def ranked(place: Path) -> list[str]:
        assert run_tool("runs", place, "--json") == 0
        return [run["path"] for run in json.loads(capsys.readouterr().out)["runs"]]

    assert len(ranked(tmp_path)) == 4
    for place in (tmp_path, tmp_path / "a", tmp_path / "c", tmp_path / "c" / "s", tmp_path / "b" / "page.html"):
        assert compared(place) == ranked(place)
    for name, words in (("d", "what it holds is damaged"), ("e", "the folder has no run in it")):
        assert run_tool("compare", tmp_path / "a", tmp_path / name) == 2
        assert words in capsys.readouterr().err
