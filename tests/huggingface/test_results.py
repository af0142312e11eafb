"""What scripts print and write when a run is over is what it is with transformers, to the byte."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from pytorch_accelerated.errors import ArgumentTypeError, CheckpointError
from pytorch_accelerated.huggingface import Trainer, TrainerState
from pytorch_accelerated.huggingface.evaluation.results import formatted
from tests.huggingface.runs import make_trainer
from tests.huggingface.test_against_transformers import run

transformers = pytest.importorskip("transformers")

METRICS: dict[str, Any] = {
    "train_runtime": 3723.4567,
    "eval_runtime": 0.0042,
    "eval_runtime_of_all": 86400 * 1.5,
    "train_loss": 0.123456789,
    "total_flos": 3.2e12,
    "eval_total_flos": 3.2e12,
    "init_mem_cpu_alloc_delta": 12345678,
    "init_mem_gpu_alloc_delta": -1,
    "train_samples": 7,
    "epoch": 3.0,
    "perplexity": float("inf"),
    "note": "good",
}


@pytest.fixture
def both(tmp_path: Path) -> dict[str, Any]:
    """A trainer of each library, with a folder of its own."""
    return {library: run(library, tmp_path / library, trains=False) for library in ("ours", "theirs")}


def files_in(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.iterdir()}


@pytest.mark.fact("Scripts: metrics_format formats durations, megabytes and gigaflops as transformers does")
def test_metrics_are_formatted_as_by_transformers() -> None:
    before = dict(METRICS)
    assert Trainer.metrics_format(METRICS) == transformers.Trainer.metrics_format(METRICS)
    assert before == METRICS
    draw = random.Random(0)
    numbers = [round(draw.uniform(0, 10 ** draw.randrange(6)), draw.randrange(7)) for _ in range(500)]
    for name in ("x_runtime", "total_flos", "loss"):
        for number in numbers:
            metrics = {name: number}
            assert formatted(metrics) == transformers.Trainer.metrics_format(metrics)


def test_a_value_that_is_not_a_number_is_left_as_it_is() -> None:
    metrics = {"x_runtime": float("nan"), "x_mem_y": None, "total_flos": "unknown", "counts": [1, 2]}
    assert str(formatted(metrics)) == str(metrics)


@pytest.mark.fact("Scripts: log_metrics prints the same table as transformers, on the first process")
def test_the_same_table_is_printed(both: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    tables = {}
    for library, trainer in both.items():
        trainer.log_metrics("train", METRICS)
        tables[library] = capsys.readouterr().out
    assert tables["ours"] == tables["theirs"] != ""
    both["ours"].log_metrics("eval", {"matrix": [1, 2], "missing": None})
    both["ours"].log_metrics("test", {})
    expected = ["***** eval metrics *****", "  matrix  = [1, 2]", "  missing =   None", "***** test metrics *****"]
    assert capsys.readouterr().out.splitlines() == expected


@pytest.mark.fact(
    "Scripts: save_metrics writes <split>_results.json and extends all_results.json, as transformers does"
)
def test_the_same_files_of_metrics_are_written(both: dict[str, Any], tmp_path: Path) -> None:
    for trainer in both.values():
        trainer.save_metrics("train", METRICS)
        trainer.save_metrics("eval", {"eval_loss": float("nan"), "epoch": 4.0, "eval_точность": 1})
        trainer.save_metrics("test", {"test_loss": 1.0, "counts": [1, {"of": 2}]}, combined=False)
    ours, theirs = files_in(tmp_path / "ours"), files_in(tmp_path / "theirs")
    assert ours == theirs
    assert sorted(ours) == [f"{split}_results.json" for split in ("all", "eval", "test", "train")]
    combined = json.loads(ours["all_results.json"])
    assert (combined["train_loss"], combined["epoch"]) == (METRICS["train_loss"], 4.0)
    assert "test_loss" not in combined


@pytest.mark.fact("Scripts: save_state writes the same trainer_state.json to output_dir as transformers")
def test_the_state_is_written_beside_the_checkpoints(both: dict[str, Any], tmp_path: Path) -> None:
    for trainer in both.values():
        trainer.save_state()
    assert files_in(tmp_path / "ours") == files_in(tmp_path / "theirs")
    trainer = both["ours"]
    trainer.train()
    trainer.save_state()
    assert TrainerState.load_from_json(tmp_path / "ours" / "trainer_state.json") == trainer.state
    assert trainer.state.global_step == 10


def test_metrics_that_json_cannot_hold_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    with pytest.raises(ArgumentTypeError, match=r"metrics 'loss' cannot be written to .*Tensor.*`.item\(\)`"):
        trainer.save_metrics("eval", {"loss": torch.ones(1)})
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_file_of_all_results_is_named_and_kept(tmp_path: Path) -> None:
    (tmp_path / "all_results.json").write_text("{")
    trainer = make_trainer(tmp_path)
    with pytest.raises(CheckpointError, match="all_results.json has the metrics of other splits, but cannot be read"):
        trainer.save_metrics("eval", {"loss": 1.0})
    assert files_in(tmp_path)["all_results.json"] == "{"
    trainer.save_metrics("eval", {"loss": 2.0}, combined=False)
    assert json.loads(files_in(tmp_path)["eval_results.json"]) == {"loss": 2.0}


def test_a_disk_that_refuses_leaves_what_was_there(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    (tmp_path / "trainer_state.json").mkdir()
    with pytest.raises(CheckpointError, match="Saving .*trainer_state.json failed"):
        trainer.save_state()
    assert [path.name for path in tmp_path.iterdir()] == ["trainer_state.json"]
