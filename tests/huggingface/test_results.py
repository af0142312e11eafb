"""What scripts print and write when a run is over is what it is with transformers, to the byte."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from pytorch_accelerated.huggingface import Trainer, TrainerState
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


def test_the_same_table_is_printed(both: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    tables = {}
    for library, trainer in both.items():
        trainer.log_metrics("train", METRICS)
        tables[library] = capsys.readouterr().out
    assert tables["ours"] == tables["theirs"] != ""
    assert Trainer.metrics_format(METRICS) == transformers.Trainer.metrics_format(METRICS)
    both["ours"].log_metrics("eval", {"matrix": [1, 2], "missing": None})
    both["ours"].log_metrics("test", {})
    expected = ["***** eval metrics *****", "  matrix  = [1, 2]", "  missing =   None", "***** test metrics *****"]
    assert capsys.readouterr().out.splitlines() == expected


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


def test_the_state_is_written_beside_the_checkpoints(both: dict[str, Any], tmp_path: Path) -> None:
    for trainer in both.values():
        trainer.save_state()
    assert files_in(tmp_path / "ours") == files_in(tmp_path / "theirs")
    trainer = both["ours"]
    trainer.train()
    trainer.save_state()
    assert TrainerState.load_from_json(tmp_path / "ours" / "trainer_state.json") == trainer.state
    assert trainer.state.global_step == 10


LABELS = {"language": "en", "license": "mit", "tags": ["tiny", "test: yes"]}
ON_A_DATASET = {"tasks": "tabular-regression", "dataset_tags": "our/rows", "dataset": "Rows", "dataset_args": "plain"}


def card_of(trainer: Trainer, **about: Any) -> Any:
    from huggingface_hub import ModelCard

    trainer.create_model_card(**about)
    return ModelCard.load(Path(str(trainer.args.output_dir)) / "README.md")


def test_the_hub_and_people_read_what_a_card_says(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path / "linear", eval_strategy="epoch", max_steps=3)
    trainer.train()
    card = card_of(trainer, model_name="Linear", finetuned_from="our/base", **LABELS, **ON_A_DATASET)
    assert {name: card.data[name] for name in LABELS} == LABELS
    assert (card.data.base_model, card.data.datasets, card.data.model_name) == ("our/base", ["our/rows"], "Linear")
    (result,) = card.data.eval_results
    assert (result.task_type, result.dataset_name, result.dataset_type) == ("tabular-regression", "Rows", "our/rows")
    assert (result.dataset_args, result.metric_type) == ("plain", "loss")
    assert card.data.pipeline_tag == "tabular-regression"
    loss = trainer.evaluate()["eval_loss"]
    assert result.metric_value == loss

    text = card_of(trainer).text
    assert "\n# linear\n" in text
    assert "`Regression` with 3 parameters" in text
    for line in ("learning_rate`: 0.1", "max_steps`: 3", f"torch`: {str(torch.__version__)!r}", f"loss`: {loss:.4f}"):
        assert line.replace("'", '"') in text
    assert "weight_decay" not in text, "it has its default"
    assert str(tmp_path) not in text, "where it was trained is nobody else's business"
