"""Scripts find the names where they look for them."""

import importlib

import pytest

import pytorch_accelerated
from pytorch_accelerated import huggingface


@pytest.mark.fact("Public names: all come from pytorch_accelerated.huggingface")
def test_the_public_names_are_there() -> None:
    names = """Trainer TrainingArguments TrainerCallback TrainerState TrainerControl CallbackHandler DefaultFlowCallback
    ProgressCallback PrinterCallback TensorBoardCallback EarlyStoppingCallback DEFAULT_CALLBACKS EvalPrediction
    EvalLoopOutput PredictionOutput TrainOutput IntervalStrategy SaveStrategy SchedulerType get_last_checkpoint
    speed_metrics default_data_collator set_seed"""
    assert set(names.split()) <= set(huggingface.__all__)
    assert all(hasattr(huggingface, name) for name in huggingface.__all__)


@pytest.mark.fact("Public names: trainer_utils, trainer_callback and training_args have the usual ones")
@pytest.mark.parametrize("module", ["trainer_utils", "trainer_callback", "training_args"])
def test_submodules_have_the_names_that_those_of_transformers_have(module: str) -> None:
    ours = importlib.import_module(f"pytorch_accelerated.huggingface.{module}")
    theirs = importlib.import_module(f"transformers.{module}")
    assert [name for name in ours.__all__ if not hasattr(theirs, name)] == []
    assert [name for name in ours.__all__ if not hasattr(ours, name)] == []


@pytest.mark.fact("Public names: set_seed is the native one")
def test_seeding_is_the_native_one() -> None:
    assert huggingface.set_seed is pytorch_accelerated.set_seed
