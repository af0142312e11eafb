"""Runs are ranked, and two configurations are judged by the same seeds: `runs`, and `compare --seeds`."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch import nn

from pytorch_accelerated import Trainer
from pytorch_accelerated.callbacks import (
    MetricsCallback,
    ReportCallback,
    ResultCallback,
    SaveTrainingStateCallback,
)
from pytorch_accelerated.extras.commands.runs import batch_means, judge, pairs_needed
from pytorch_accelerated.extras.report.contents import RunContents, write_page
from pytorch_accelerated.extras.report.reading import read_run
from pytorch_accelerated.tracking import InMemoryRunHistory
from tests.report.digits import train, trainer_with
from tests.support.tool import run_tool

METRIC = "eval_accuracy"


class Failing(Trainer):
    """Fails in its first batch."""

    def calculate_train_batch_loss(self, batch: Any) -> Any:
        raise ZeroDivisionError("no")


@pytest.fixture
def asked(capsys: pytest.CaptureFixture[str]) -> Any:
    """The exit code of a command with ``--json``, and its object, which is all that it prints."""

    def ask(*words: object, code: int = 0) -> dict[str, Any]:
        capsys.readouterr()
        assert run_tool(*words, "--json") == code
        printed = capsys.readouterr()
        assert printed.err == ""
        found = json.loads(printed.out, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
        assert found["format"] == 1
        assert isinstance(found, dict)
        return found

    return ask


def write_run(
    path: Path,
    value: float | None,
    seed: int | None,
    status: str = "finished",
    metric: str = METRIC,
    *,
    loss: float = 1.0,
    is_watched: bool = True,
    **state: Any,
) -> None:
    """The page of a run with one value."""
    history = InMemoryRunHistory()
    contents = RunContents(path.stem, state={"status": status, **state})
    if value is not None:
        history.update_metric("eval_loss_epoch", loss)
        history.update_metric(metric, value)
        contents.read_history(history, {metric: "loss" not in metric} if is_watched else {})
    if seed is not None:
        contents.config = {"seed": seed}
    write_page([contents], path.stem, path)


def write_runs(folder: Path, values: dict[int, float], **more: Any) -> Path:
    for seed, value in values.items():
        write_run(folder / f"seed_{seed}.html", value, seed, **more)
    return folder


def result_of_a_run(**changes: Any) -> dict[str, Any]:
    """What `ResultCallback` writes beside a run."""
    best = {"name": METRIC, "value": 0.9, "epoch": 2, "update": 20, "greater_is_better": True}
    return {
        "format": 1,
        "status": "finished",
        "reason": "",
        "started": 1.7e9,
        "updated": 1.7e9 + 9,
        "pid": 7,
        "host": "here",
        "epoch": 3,
        "updates": 30,
        "seconds": 9.0,
        "startup_seconds": 1.0,
        "peak_memory": None,
        "best": best,
        "metrics": {METRIC: 0.8},
        "error": None,
        "alerts": [],
        "files": {},
        "config": {"seed": 3, "num_epochs": 3},
        "notes": {"lr": 0.1},
        **changes,
    }


def write_result(folder: Path, **changes: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "result.json").write_text(json.dumps(result_of_a_run(**changes)))
    return folder


# The statistics.


def test_a_verdict_is_that_of_the_paired_t_test():
    first, second = [0.94, 0.95, 0.93, 0.96], [0.95, 0.97, 0.95, 0.965]
    verdict = judge(first, second, greater_is_better=True)
    differences = np.subtract(second, first)
    test = stats.ttest_1samp(differences, 0)
    assert verdict.outcome == "better"
    assert verdict.p_value == pytest.approx(float(test.pvalue), rel=1e-9)
    assert verdict.difference == pytest.approx(float(differences.mean()), rel=1e-9)
    margin = stats.t.ppf(0.975, 3) * differences.std(ddof=1) / 2
    assert verdict.margin == pytest.approx(float(margin), rel=1e-9)
    assert judge(first, second, greater_is_better=False).outcome == "worse"
    assert judge(second, first, greater_is_better=False).outcome == "better"


def test_the_number_of_pairs_has_known_values_and_limits():
    """The values are those of G*Power 3.1 for a two-sided paired t-test."""
    assert [pairs_needed(effect) for effect in (0.2, 0.5, 0.8)] == [199, 34, 15]
    assert pairs_needed(100.0) in (2, 3)
    assert pairs_needed(0.0) is None
    assert pairs_needed(1e-6) is None


@pytest.mark.parametrize(("pairs", "outcome"), [(2, "not decided"), (5, "not decided"), (6, "better")])
def test_equal_differences_are_judged_by_their_signs(pairs: int, outcome: str):
    first = [0.1 * number for number in range(pairs)]
    second = [value + 0.01 for value in first]  # differs in the last bits
    verdict = judge(first, second, greater_is_better=True)
    assert (verdict.outcome, verdict.p_value, verdict.margin) == (outcome, 2 / 2**pairs, None)
    assert verdict.pairs_needed == 6


def test_equal_values_are_never_decided():
    verdict = judge([0.5] * 20, [0.5] * 20, greater_is_better=True)
    assert verdict == ("not decided", (0.5, 0.5), 0.0, None, 1.0, None)


# compare --seeds


def test_runs_are_paired_by_their_seeds_and_judged(tmp_path: Path, asked: Any, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    first = {1: 0.94, 2: 0.95, 3: 0.93, 4: 0.96, 9: 0.1}
    second = {4: 0.965, 3: 0.95, 2: 0.97, 1: 0.95, 8: 0.99}
    write_runs(Path("a"), first)
    write_runs(Path("b"), second)
    assert run_tool("compare", "a", "b", "--seeds") == 0
    *left_out, sentence = capsys.readouterr().out.splitlines()
    assert sentence == (
        "b is better than a: eval_accuracy 0.9587 against 0.945 (mean difference 0.0137 ± 0.012 (95 %), 4 pairs of "
        "seeds, p = 0.035)."
    )
    assert left_out == [
        "Left out: a: only here is a run with seed 9",
        "Left out: b: only here is a run with seed 8",
    ]
    found = asked("compare", "a", "b", "--seeds")
    expected = judge(
        [first[seed] for seed in (1, 2, 3, 4)], [second[seed] for seed in (1, 2, 3, 4)], greater_is_better=True
    )
    assert {name: found[name] for name in expected._fields} == {**expected._asdict(), "means": list(expected.means)}
    assert (found["command"], found["metric"], found["greater_is_better"]) == ("compare", METRIC, True)
    assert [found["first"], found["second"]] == ["a", "b"]
    assert [(pair["seed"], pair["first"], pair["second"]) for pair in found["pairs"]] == [
        (str(seed), first[seed], second[seed]) for seed in (1, 2, 3, 4)
    ]
    assert len(found["left_out"]) == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]  # no page


def test_what_is_not_decided_says_how_many_seeds_would_do(tmp_path: Path, capsys):
    write_runs(tmp_path / "a", {1: 0.94, 2: 0.95, 3: 0.93})
    write_runs(tmp_path / "b", {1: 0.95, 2: 0.94, 3: 0.95})
    write_runs(tmp_path / "c", {1: 0.94, 2: 0.95, 3: 0.93})
    run_tool("compare", tmp_path / "a", tmp_path / "b", "--seeds")
    text = capsys.readouterr().out
    effect = np.mean([0.01, -0.01, 0.02]) / np.std([0.01, -0.01, 0.02], ddof=1)
    assert text.startswith(f"Not decided: eval_accuracy 0.9467 of {tmp_path / 'b'} against 0.94 of {tmp_path / 'a'} (")
    assert f"About {pairs_needed(float(effect))} pairs of seeds would decide a difference of this size" in text
    run_tool("compare", tmp_path / "a", tmp_path / "c", "--seeds")
    text = capsys.readouterr().out
    assert "(mean difference 0 in each pair, 3 pairs of seeds, p = 1). More than 100,000 pairs" in text


def test_a_metric_can_be_named_and_less_may_be_better(tmp_path: Path, asked: Any):
    for name, shift in (("a", 0.0), ("b", -0.1)):
        write_runs(
            tmp_path / name, {seed: 1 + seed / 7 + shift * (1 + seed / 50) for seed in range(5)}, metric="eval_loss"
        )
    found = asked("compare", tmp_path / "a", tmp_path / "b", "--seeds", "--metric", "eval_loss")
    assert (found["outcome"], found["greater_is_better"]) == ("better", False)
    found = asked("compare", tmp_path / "a", tmp_path / "b", "--seeds", "--metric", "lost", code=2)
    assert found["error"]["type"] == "ConfigurationError"
    assert "No run has a best value of 'lost', but of: eval_loss, eval_loss_epoch." in found["error"]["message"]


def test_runs_without_a_result_or_a_seed_are_left_out_by_name(tmp_path: Path, asked: Any):
    for name in ("a", "b"):
        write_runs(tmp_path / name, {1: 0.5, 2: 0.6, 3: 0.7})
    write_run(tmp_path / "a" / "x_failed.html", 0.9, 1, "failed", detail="ValueError: no")
    write_run(tmp_path / "a" / "x_running.html", 0.9, 1, "running")
    write_run(tmp_path / "b" / "no_seed.html", 0.9, None)
    write_run(tmp_path / "b" / "no_value.html", None, 7)
    write_run(tmp_path / "a" / "of_both.html", 0.5, 4)
    best = {"name": METRIC, "value": math.inf, "epoch": 2, "update": 20, "greater_is_better": True}
    write_result(tmp_path / "b" / "infinite", config={"seed": 4}, best=best)
    (tmp_path / "b" / "broken.html").write_text('<script id="run-data" type="application/json">{</script>')
    found = asked("compare", tmp_path / "a", tmp_path / "b", "--seeds")
    assert [pair["seed"] for pair in found["pairs"]] == ["1", "2", "3"]
    left_out = "\n".join(found["left_out"])
    assert f"{tmp_path / 'a' / 'x_failed.html'}: failed, ValueError: no" in left_out
    assert f"{tmp_path / 'a' / 'x_running.html'}: running\n" in left_out
    assert f"{tmp_path / 'b' / 'no_seed.html'}: its page or result.json has no seed" in left_out
    assert f"{tmp_path / 'b' / 'no_value.html'}: no finite value of 'eval_accuracy'" in left_out
    assert f"{tmp_path / 'b' / 'broken.html'}: unreadable, " in left_out
    assert f"{tmp_path / 'b' / 'infinite'}: no finite value of 'eval_accuracy'" in left_out
    assert len(found["left_out"]) == 7


SEED_MISTAKES = {
    "two runs with one seed": ({1: 0.5, 2: 0.6}, {1: 0.5, 2: 0.6}, "is the second run with seed 1. Keep one of each"),
    "no common seeds": ({1: 0.5, 2: 0.6}, {3: 0.5, 4: 0.6}, "Pairs: 0. Train both sides with more seeds. Left out: "),
    "one pair": ({1: 0.5}, {1: 0.6}, "Pairs: 1. Train both sides with more seeds. Left out: none."),
    "nothing there": ({1: 0.5}, {}, "There is no file or folder '{}/b'"),
}


@pytest.mark.parametrize(("first", "second", "message"), SEED_MISTAKES.values(), ids=SEED_MISTAKES)
def test_runs_that_cannot_be_paired_are_an_error(first, second, message, tmp_path: Path, asked: Any):
    write_runs(tmp_path / "a", first)
    write_runs(tmp_path / "b", second)
    if "second run" in message:
        write_run(tmp_path / "a" / "twice.html", 0.5, 1)
    error = asked("compare", tmp_path / "a", tmp_path / "b", "--seeds", code=2)["error"]
    assert message.format(tmp_path) in error["message"]


def test_a_verdict_takes_two_folders(tmp_path: Path, asked: Any):
    error = asked("compare", tmp_path, "--seeds", code=2)["error"]
    assert "--seeds compares two folders of runs, not 1" in error["message"]


def test_a_seed_that_nobody_gave_makes_no_pair(tmp_path: Path, asked: Any):
    for name in ("a", "b"):
        for number, seed in enumerate((5, 6, None)):
            torch.manual_seed(7)  # so that what is derived from it is the same on both sides
            model = nn.Linear(3, 1)
            result = ResultCallback(tmp_path / name / str(number) / "result.json")
            trainer = Trainer(
                model, nn.MSELoss(), torch.optim.SGD(model.parameters(), 0.1), callbacks=[result], seed=seed
            )
            trainer.train((torch.randn(8, 3), torch.randn(8, 1)), 1, per_device_batch_size=4)
    found = asked("compare", tmp_path / "a", tmp_path / "b", "--seeds")
    assert [pair["seed"] for pair in found["pairs"]] == ["5", "6"]
    assert [reason.partition(":")[0] for reason in found["left_out"]] == [str(tmp_path / name / "2") for name in "ab"]


# runs


def test_a_run_that_failed_before_its_first_update_is_ranked_last_with_its_error(tmp_path: Path, asked: Any):
    train(trainer_with(ResultCallback(tmp_path / "good" / "result.json")), 1)
    with pytest.raises(ZeroDivisionError) as raised:
        train(trainer_with(ResultCallback(tmp_path / "bad" / "result.json"), trainer_class=Failing), 1)
    good, bad = asked("runs", tmp_path)["runs"]
    result = json.loads((tmp_path / "good" / "result.json").read_text())
    assert (good["name"], good["status"], good["best"]) == ("good", "finished", result["best"])
    assert (bad["name"], bad["status"], bad["best"], bad["updates"]) == ("bad", "failed", None, 0)
    error = {"type": "ZeroDivisionError", "message": "no", "notes": list(getattr(raised.value, "__notes__", []))}
    assert (bad["reason"], bad["error"]) == ("ZeroDivisionError: no", error)


def test_runs_are_ranked_with_the_best_first(tmp_path: Path, asked: Any, capsys):
    for name, value, status in (("a", 0.7, "finished"), ("b", 0.9, "stopped"), ("c", None, "failed")):
        write_run(tmp_path / name / "report.html", value, 1, status, seconds=90.0, epoch=4, updates=40)
    train(trainer_with(MetricsCallback(["accuracy"]), SaveTrainingStateCallback(tmp_path / "states")), 2)
    write_result(tmp_path / "d")
    (tmp_path / "d" / "report.html.partial").write_text("x")
    damaged = write_result(tmp_path / "e")
    (damaged / "result.json").write_text("{")
    write_result(tmp_path / "f", format=2)
    capsys.readouterr()
    assert run_tool("runs", tmp_path) == 0
    header, *rows = capsys.readouterr().out.splitlines()
    assert header.split() == ["run", "status", "best", METRIC, "epoch", "updates", "time", "path"]
    cells = [row.split() for row in rows]
    assert ["report", "stopped", "0.9", "1", "0", "01:30", str(tmp_path / "b" / "report.html")] in cells
    assert sum("Unreadable: " in row for row in rows) == 2
    found = asked("runs", tmp_path)
    assert found["metric"] == METRIC
    values = [run["best"]["value"] for run in found["runs"] if run["best"]]
    assert len(values) == 4
    assert values == sorted(values, reverse=True)
    by_path = {Path(run["path"]).relative_to(tmp_path).parts[0]: run for run in found["runs"]}
    assert sorted(by_path) == ["a", "b", "c", "d", "e", "f", "states"]
    statuses = {name: run["status"] for name, run in by_path.items()}
    expected = {"a": "finished", "b": "stopped", "c": "failed", "d": "finished", "states": None}
    assert statuses == {**expected, "e": "unreadable", "f": "unreadable"}
    assert "result.json has format 2" in by_path["f"]["reason"]
    result = result_of_a_run()
    assert by_path["d"]["best"] == result["best"]
    assert [by_path["d"][name] for name in ("epoch", "updates", "seconds", "updated")] == [3, 30, 9.0, 1.7e9 + 9]


def test_the_metric_of_the_ranking_is_the_watched_one_or_can_be_named(tmp_path: Path, asked: Any):
    for name, loss, accuracy in (("a", 0.1, 0.8), ("b", 0.3, 0.9)):
        write_run(tmp_path / f"{name}.html", accuracy, None, loss=loss)
    for words, metric, expected in ((), METRIC, "ba"), (("--metric", "eval_loss_epoch"), "eval_loss_epoch", "ab"):
        found = asked("runs", tmp_path, *words)
        assert (found["metric"], "".join(run["name"] for run in found["runs"])) == (metric, expected)
        output = tmp_path.parent / "compare.html"
        assert run_tool("compare", tmp_path, *words, "--output", output) == 0
        assert output.read_text().index(f'"name":"{expected[0]}"') < output.read_text().index(f'"name":"{expected[1]}"')
    assert asked("runs", tmp_path, "--metric", "lost", code=2)["error"]["type"] == "ConfigurationError"


def test_an_empty_folder_has_no_runs_and_a_missing_one_is_an_error(tmp_path: Path, asked: Any, capsys):
    assert run_tool("runs", tmp_path) == 0
    assert capsys.readouterr().out == f"No runs in {tmp_path}.\n"
    assert asked("runs", tmp_path) == {"format": 1, "command": "runs", "metric": None, "runs": []}
    error = asked("runs", tmp_path / "nowhere", code=2)["error"]
    assert error == {
        "type": "RunFileError",
        "message": f"There is no file or folder '{tmp_path / 'nowhere'}'. Check the path.",
    }


# result.json


def test_the_status_of_a_run_is_that_of_its_result_and_its_curves_are_those_of_the_page(tmp_path: Path, asked: Any):
    run = tmp_path / "run"
    train(trainer_with(ReportCallback(run / "report.html"), SaveTrainingStateCallback(run / "states")), 2)
    alone = read_run(run / "report.html")
    error = {"type": "ValueError", "message": "no", "notes": ["in batch 3"]}
    write_result(run, status="failed", reason="ValueError: no", error=error, best=None, epoch=3)
    (found,) = asked("runs", tmp_path)["runs"]
    assert found["path"] == str(run / "report.html")
    assert (found["status"], found["reason"], found["error"], found["epoch"]) == ("failed", "ValueError: no", error, 3)
    both = read_run(run / "report.html")
    assert (both.metrics, both.steps, both.config, both.best) == (alone.metrics, alone.steps, alone.config, alone.best)
    (run / "report.html").unlink()
    (found,) = asked("runs", tmp_path)["runs"]  # the states are one folder down
    states = read_run(run)
    assert (found["path"], found["name"], found["status"]) == (str(run), "run", "failed")
    assert states.metrics == alone.metrics
    assert states.config["seed"] == 3
    assert [read_run(path).state for path in (run, run / "result.json")] == [states.state] * 2


def test_the_metric_by_which_a_result_is_judged_counts_as_watched(tmp_path: Path, asked: Any):
    for name, loss, accuracy in (("a", 0.1, 0.8), ("b", 0.3, 0.9)):
        write_run(tmp_path / name / "report.html", accuracy, None, loss=loss, is_watched=False)
    assert asked("runs", tmp_path)["metric"] == "eval_loss_epoch"
    for name, accuracy in (("a", 0.8), ("b", 0.9)):
        write_result(tmp_path / name, best={**result_of_a_run()["best"], "value": accuracy})
    found = asked("runs", tmp_path)
    assert (found["metric"], [Path(run["path"]).parent.name for run in found["runs"]]) == (METRIC, ["b", "a"])


def test_a_result_beside_several_pages_belongs_to_none_of_them(tmp_path: Path, asked: Any):
    write_runs(tmp_path, {1: 0.5, 2: 0.6})
    write_result(tmp_path, status="failed")
    assert [run["status"] for run in asked("runs", tmp_path)["runs"]] == ["finished", "finished"]


def test_runs_below_a_folder_with_a_result_are_runs_of_their_own(tmp_path: Path, asked: Any):
    write_result(tmp_path)
    write_result(tmp_path / "fold_1")
    write_result(tmp_path / "deep" / "fold_2")
    found = asked("runs", tmp_path)["runs"]
    assert {Path(run["path"]) for run in found} == {tmp_path, tmp_path / "fold_1", tmp_path / "deep" / "fold_2"}


DAMAGED = {
    "not an object": [],
    "no status": {"format": 1},
    "a config of another kind": result_of_a_run(config=3),
    "a best value without its place": result_of_a_run(best={"name": METRIC, "value": 1.0}),
}


@pytest.mark.parametrize("content", DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_result_is_a_row_that_says_so(content: Any, tmp_path: Path, asked: Any):
    (tmp_path / "result.json").write_text(json.dumps(content))
    (found,) = asked("runs", tmp_path)["runs"]
    assert found["status"] == "unreadable"
    assert "what it holds is damaged, or of another kind. A run is a page" in found["reason"]


def test_results_are_paired_and_drawn_like_pages(tmp_path: Path, asked: Any):
    for name, shift in (("a", 0.0), ("b", 0.05)):
        for seed in range(4):
            best = {**result_of_a_run()["best"], "value": 0.5 + seed / 20 + shift * (1 + seed / 9)}
            write_result(tmp_path / name / str(seed), best=best, config={"seed": seed})
    output = tmp_path / "compare.html"
    found = asked("compare", tmp_path / "a", tmp_path / "b", "--seeds", "--output", output)
    assert (found["outcome"], len(found["pairs"]), found["output"]) == ("better", 4, str(output))
    assert output.is_file()


def test_the_interval_of_batch_means_is_that_of_a_test_on_ten_stretches():
    values = np.random.default_rng(0).normal(0.1, 1.0, 237).cumsum()
    mean, margin = batch_means(values.tolist())
    stretches = values[7:].reshape(10, 23).mean(1)
    test = stats.ttest_1samp(stretches, 0.0)
    low, high = test.confidence_interval(0.95)
    assert mean == pytest.approx(stretches.mean(), rel=1e-12)
    assert margin == pytest.approx((high - low) / 2, rel=1e-9)
    assert batch_means([1.0] * 19) == (1.0, None)
    assert math.isnan(batch_means([])[0])


def test_the_interval_covers_the_mean_of_differences_of_which_neighbours_are_alike():
    generator, naive, honest = np.random.default_rng(1), 0, 0
    for _ in range(200):
        noise = generator.normal(size=1100)
        series = [0.0]
        for each in noise:
            series.append(0.8 * series[-1] + each)
        values = series[101:]
        mean, margin = batch_means(values)
        assert margin is not None
        honest += abs(mean) <= margin
        naive += abs(mean) <= 1.96 * float(np.std(values)) / math.sqrt(len(values))
    assert honest >= 180  # 95 % of 200 are 190
    assert naive <= 120
