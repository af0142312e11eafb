"""Scripts find the names where they look for them, and run with both trainers."""

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pytorch_accelerated import huggingface
from pytorch_accelerated.huggingface import (
    EarlyStoppingCallback,
    EvalLoopOutput,
    EvalPrediction,
    PredictionOutput,
    TrainOutput,
)
from scripts.transformers_scripts import main
from tests.chaos.size import in_release
from tests.huggingface.runs import Rows, losses, make_trainer

EVALUATED_AND_SAVED: dict[str, Any] = {
    "eval_strategy": "epoch",
    "save_strategy": "epoch",
    "load_best_model_at_end": True,
}


def test_the_public_names_are_there() -> None:
    names = """Trainer TrainingArguments TrainerCallback TrainerState TrainerControl CallbackHandler DefaultFlowCallback
    ProgressCallback PrinterCallback TensorBoardCallback EarlyStoppingCallback DEFAULT_CALLBACKS EvalPrediction
    EvalLoopOutput PredictionOutput TrainOutput IntervalStrategy SaveStrategy SchedulerType get_last_checkpoint
    speed_metrics default_data_collator set_seed"""
    assert set(names.split()) <= set(huggingface.__all__)
    assert all(hasattr(huggingface, name) for name in huggingface.__all__)


@pytest.mark.parametrize("module", ["trainer_utils", "trainer_callback", "training_args"])
def test_submodules_have_the_names_that_those_of_transformers_have(module: str) -> None:
    ours = importlib.import_module(f"pytorch_accelerated.huggingface.{module}")
    theirs = importlib.import_module(f"transformers.{module}")
    assert [name for name in ours.__all__ if not hasattr(theirs, name)] == []
    assert [name for name in ours.__all__ if not hasattr(ours, name)] == []


def test_names_that_are_private_elsewhere_are_found_where_scripts_look() -> None:
    from transformers import trainer as theirs

    from pytorch_accelerated.huggingface import trainer as ours
    from pytorch_accelerated.huggingface.trainer_callback import ExportableState

    assert ours.TRAINER_STATE_NAME == theirs.TRAINER_STATE_NAME
    our_names, their_names = ([kind.__name__ for kind in each.DEFAULT_CALLBACKS] for each in (ours, theirs))
    assert our_names == their_names
    assert issubclass(huggingface.EarlyStoppingCallback, ExportableState)


def test_nothing_else_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] in ("transformers", "datasets")]:
        monkeypatch.delitem(sys.modules, name)
    for name in ("transformers", "datasets"):
        monkeypatch.setitem(sys.modules, name, None)  # so that importing it fails
    whole = make_trainer(tmp_path, EarlyStoppingCallback(9), **EVALUATED_AND_SAVED)
    whole.train()
    resumed = make_trainer(tmp_path, EarlyStoppingCallback(9), **EVALUATED_AND_SAVED)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-5"))
    assert losses(resumed) == losses(whole)
    assert resumed.evaluate()["eval_loss"] == whole.state.best_metric
    assert len(resumed.predict(Rows(3)).predictions) == 3


@pytest.mark.parametrize("extras", [{}, {"inputs": "in"}, {"losses": "out"}, {"inputs": "in", "losses": "out"}])
def test_a_prediction_iterates_and_indexes_like_that_of_transformers(extras: dict[str, Any]) -> None:
    from transformers import EvalPrediction as GenuinePrediction

    arrays: Any = np.zeros(2), np.ones(2)
    ours, theirs = EvalPrediction(*arrays, **extras), GenuinePrediction(*arrays, **extras)
    assert list(map(id, ours)) == list(map(id, theirs))
    assert [id(ours[index]) for index in range(len(list(ours)))] == list(map(id, theirs))
    with pytest.raises(IndexError):
        ours[len(list(ours))]
    assert (ours.predictions, ours.label_ids) == arrays
    assert (ours.inputs, ours.losses) == (extras.get("inputs"), extras.get("losses"))


def test_outputs_have_the_fields_of_those_of_transformers() -> None:
    from transformers import trainer_utils as genuine

    for ours in (EvalLoopOutput, PredictionOutput, TrainOutput):
        assert ours._fields == getattr(genuine, ours.__name__)._fields


SCRIPT = """
import numpy as np
from datasets import load_dataset
from transformers import (
    AutoModelForSequenceClassification, AutoTokenizer, HfArgumentParser, Trainer, TrainingArguments, set_seed,
)
from dataclasses import dataclass

@dataclass
class Other:
    model_name_or_path: str
    train_file: str
    validation_file: str
    test_file: str

other, args = HfArgumentParser((Other, TrainingArguments)).parse_args_into_dataclasses()
set_seed(args.seed)
tokenizer = AutoTokenizer.from_pretrained(other.model_name_or_path)
model = AutoModelForSequenceClassification.from_pretrained(other.model_name_or_path, num_labels=3)
sets = load_dataset("json", data_files={"train": other.train_file, "validation": other.validation_file})
sets = sets.map(lambda rows: tokenizer(rows["sentence1"], rows["sentence2"]), batched=True)
trainer = Trainer(
    model, args, train_dataset=sets["train"], eval_dataset=sets["validation"], processing_class=tokenizer,
    compute_metrics=lambda p: {"accuracy": float((np.argmax(p.predictions, 1) == p.label_ids).mean())},
)
result = trainer.train()
trainer.save_metrics("train", {**result.metrics, "kind": len(Trainer.__module__)})
trainer.save_state()
trainer.save_metrics("eval", trainer.evaluate())
with open(f"{args.output_dir}/predictions.txt", "w") as file:
    file.write(str(np.argmax(trainer.predict(sets["validation"]).predictions, 1)))
"""


@in_release
@pytest.mark.processes
def test_a_script_runs_with_both_trainers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run_it.py").write_text(SCRIPT)
    common = "--max_steps 3 --per_device_train_batch_size 2 --logging_steps 1 --train_sampling_strategy sequential "
    cases = {
        "common": f"{common} --report_to none --use_cpu --eval_strategy steps",
        "rows": {"train": 6, "validation": 8, "test": 1},
        "scripts": {"run_it.py": {"model": "bert", "data": "pairs", "arguments": "--learning_rate 0.01"}},
    }
    (tmp_path / "cases.json").write_text(json.dumps(cases))
    options = {"--folder": tmp_path, "--cases": tmp_path / "cases.json", "--output": tmp_path / "table.md"}
    code = main([str(word) for pair in options.items() for word in pair])
    output = capsys.readouterr().out
    assert code == 1, output
    assert [line.split(":")[0] for line in output.splitlines() if ": ours " in line] == ["  .results.kind"]
    assert "| `run_it.py` | 1 line added |" in (tmp_path / "table.md").read_text()
