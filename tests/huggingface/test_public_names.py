"""Scripts find the names where they look for them."""

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

import pytorch_accelerated
from pytorch_accelerated import huggingface
from pytorch_accelerated.huggingface import EarlyStoppingCallback
from tests.huggingface.runs import Rows, losses, make_trainer
from tests.support.processes import run_script

EVALUATED_AND_SAVED: dict[str, Any] = {
    "eval_strategy": "epoch",
    "save_strategy": "epoch",
    "load_best_model_at_end": True,
}


@pytest.mark.fact("Public names: All names can be imported from pytorch_accelerated.huggingface")
def test_the_public_names_are_there() -> None:
    names = """Trainer TrainingArguments TrainerCallback TrainerState TrainerControl CallbackHandler DefaultFlowCallback
    ProgressCallback PrinterCallback TensorBoardCallback EarlyStoppingCallback DEFAULT_CALLBACKS EvalPrediction
    EvalLoopOutput PredictionOutput TrainOutput IntervalStrategy SaveStrategy SchedulerType get_last_checkpoint
    speed_metrics default_data_collator set_seed"""
    assert set(names.split()) <= set(huggingface.__all__)
    assert all(hasattr(huggingface, name) for name in huggingface.__all__)


@pytest.mark.fact("Public names: trainer_utils, trainer_callback and training_args have the usual names")
@pytest.mark.parametrize("module", ["trainer_utils", "trainer_callback", "training_args"])
def test_submodules_have_the_names_that_those_of_transformers_have(module: str) -> None:
    ours = importlib.import_module(f"pytorch_accelerated.huggingface.{module}")
    theirs = importlib.import_module(f"transformers.{module}")
    assert [name for name in ours.__all__ if not hasattr(theirs, name)] == []
    assert [name for name in ours.__all__ if not hasattr(ours, name)] == []


@pytest.mark.fact("Public names: The submodules are attributes of the package, even without importing them")
@pytest.mark.processes
def test_submodules_are_there_once_the_package_is() -> None:
    output = run_script(
        """
import pytorch_accelerated.huggingface as H

assert H.trainer_utils.set_seed is H.set_seed
assert H.trainer_callback.TrainerCallback is H.TrainerCallback
assert H.training_args.IntervalStrategy is H.IntervalStrategy
try:
    H.trainer_utlis
except AttributeError as error:
    print(error)
"""
    )
    assert output.stdout == "module 'pytorch_accelerated.huggingface' has no attribute 'trainer_utlis'\n"


@pytest.mark.fact(
    "Public names: trainer has TRAINER_STATE_NAME and DEFAULT_CALLBACKS, trainer_callback has ExportableState"
)
def test_names_that_are_private_elsewhere_are_found_where_scripts_look() -> None:
    from transformers import trainer as theirs

    from pytorch_accelerated.huggingface import trainer as ours
    from pytorch_accelerated.huggingface.trainer_callback import ExportableState

    assert ours.TRAINER_STATE_NAME == theirs.TRAINER_STATE_NAME
    our_names, their_names = ([kind.__name__ for kind in each.DEFAULT_CALLBACKS] for each in (ours, theirs))
    assert our_names == their_names
    assert issubclass(huggingface.EarlyStoppingCallback, ExportableState)


@pytest.mark.fact("Interoperation: Neither transformers nor datasets is needed to train, evaluate, predict and resume")
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


@pytest.mark.fact("Public names: set_seed is the native function")
def test_seeding_is_the_native_one() -> None:
    assert huggingface.set_seed is pytorch_accelerated.set_seed
