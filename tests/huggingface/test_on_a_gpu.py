"""The same runs on a CUDA device."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate.state import AcceleratorState

from pytorch_accelerated.huggingface import Trainer
from tests.huggingface.runs import NoisyRows, Rows, StopAt, make_trainer, without_speed
from tests.support.resuming import assert_same
from tests.support.states import verify

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("_process_without_a_trainer")]

LONG: dict[str, Any] = {
    "gradient_accumulation_steps": 2,
    "weight_decay": 0.1,
    "max_grad_norm": 0.5,
    "warmup_steps": 2,
    "eval_strategy": "steps",
    "eval_steps": 2,
    "save_strategy": "steps",
    "save_steps": 2,
    "load_best_model_at_end": True,
}


def trained(folder: Path, *callbacks: Any, resume: bool = False, **arguments: Any) -> Trainer:
    trainer = make_trainer(folder, *callbacks, **{**LONG, "use_cpu": False, **arguments})
    trainer.train(resume_from_checkpoint=resume)
    assert arguments.get("use_cpu") or trainer.model.linear.weight.is_cuda
    return trainer


def results(trainer: Trainer) -> dict[str, Any]:
    return {
        "model": {name: value.cpu() for name, value in trainer.model.state_dict().items()},
        "history": without_speed(trainer.state.log_history[:-1]),
    }


def test_a_run_is_that_on_the_cpu(tmp_path: Path) -> None:
    found: list[dict[str, Any]] = []
    for name in ("gpu", "cpu"):
        AcceleratorState._reset_state(reset_partial_state=True)  # which else keeps the device
        trainer = trained(tmp_path / name, use_cpu=name == "cpu")
        verify(tmp_path / name / "checkpoint-4")
        found.append(results(trainer))
        found[-1]["evaluated"] = trainer.evaluate()["eval_loss"]
        found[-1]["predicted"] = trainer.predict(Rows(7)).predictions
        assert isinstance(found[-1]["predicted"], np.ndarray)
    torch.testing.assert_close(found[0], found[1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("precision", [{}, {"bf16": True}])
@pytest.mark.parametrize("step", [2, 4])
def test_a_resumed_run_equals_the_uninterrupted_one(step: int, precision: dict[str, Any], tmp_path: Path) -> None:
    arguments = {**precision, "load_best_model_at_end": False, "parts": {"train_dataset": NoisyRows(10)}}
    whole = results(trained(tmp_path / "whole", **arguments))
    trained(tmp_path / "parts", StopAt(step), **arguments)
    resumed = trained(tmp_path / "parts", resume=True, **arguments)
    assert_same(results(resumed), whole)
    AcceleratorState._reset_state(reset_partial_state=True)
    moved = make_trainer(tmp_path / "parts", **{**LONG, **arguments, "bf16": False})
    moved.train(resume_from_checkpoint=str(tmp_path / "parts" / f"checkpoint-{step}"))
    if not precision:
        torch.testing.assert_close(results(moved), whole, rtol=1e-5, atol=1e-6)
