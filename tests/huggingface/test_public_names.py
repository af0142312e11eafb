"""Scripts find the names where they look for them, and run with both trainers."""

import importlib
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


@pytest.mark.parametrize(
    ("module", "names"),
    [
        ("training_args", "HubStrategy IntervalStrategy OptimizerNames ParallelMode SaveStrategy SchedulerType"),
        ("training_args", "TrainingArguments"),
        ("trainer_callback", "CallbackHandler DefaultFlowCallback EarlyStoppingCallback ExportableState"),
        ("trainer_callback", "PrinterCallback ProgressCallback TrainerCallback TrainerControl TrainerState"),
        ("trainer_utils", "EvalLoopOutput EvalPrediction HubStrategy IntervalStrategy PREFIX_CHECKPOINT_DIR"),
        ("trainer_utils", "PredictionOutput RemoveColumnsCollator SaveStrategy SchedulerType TrainOutput set_seed"),
        ("trainer_utils", "enable_full_determinism get_last_checkpoint rotate_checkpoints sort_checkpoints"),
        ("trainer_utils", "speed_metrics"),
        ("trainer_seq2seq", "Seq2SeqTrainer"),
        ("trainer", "DEFAULT_CALLBACKS TRAINER_STATE_NAME"),
    ],
)
def test_modules_have_the_names_that_those_of_transformers_have(module: str, names: str) -> None:
    for library in ("pytorch_accelerated.huggingface", "transformers"):
        found = importlib.import_module(f"{library}.{module}")
        assert [name for name in names.split() if not hasattr(found, name)] == []


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
