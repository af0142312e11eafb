"""The command that runs example scripts of transformers with its trainer and with ours."""

import json
import math
from pathlib import Path

import pytest

from scripts.transformers_scripts import Outcome, largest_difference, main, with_our_trainer

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


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.fact(
    "Compared with transformers: A script with only its import changed gives the same results (transformers_scripts.py)"
)
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


def test_only_the_imports_of_trainers_change() -> None:
    source = (
        "import os\nfrom transformers import (\n    Trainer,\n    set_seed,\n)\nfrom trainer_qa import Trainer as T\n"
    )
    changed, added = with_our_trainer(source)
    assert added == ["from pytorch_accelerated.huggingface import Trainer"]
    assert changed == source.replace(")\n", f")\n{added[0]}\n")


@pytest.mark.parametrize(
    ("ours", "theirs", "difference"),
    [
        (Outcome({"loss": 2.0}, {}), Outcome({"loss": 2.0}, {}), 0.0),
        (Outcome({"loss": 1.98}, {}), Outcome({"loss": 2.0}, {}), 0.01),
        (Outcome({"loss": 2.0}, {}), Outcome({"loss": 2.0, "f1": 1.0}, {}), math.inf),
        (Outcome({"best": "a"}, {}), Outcome({"best": None}, {}), math.inf),
        (Outcome({"loss": 2.0}, {"predictions.txt": "1"}), Outcome({"loss": 2.0}, {"predictions.txt": "2"}), math.inf),
    ],
)
def test_the_largest_difference_is_reported(ours: Outcome, theirs: Outcome, difference: float) -> None:
    assert largest_difference(ours, theirs) == pytest.approx(difference)


def test_intended_differences_do_not_count() -> None:
    ours, theirs = Outcome({"loss": 1.0, "eval_len": 1.0}, {}), Outcome({"loss": 1.0, "eval_len": 2.0}, {})
    assert largest_difference(ours, theirs) == 0.5
    assert largest_difference(ours, theirs, ["_len"]) == 0.0
