"""A profile of a few updates."""

import contextlib
import json
from pathlib import Path

import pytest
import torch

from pytorch_accelerated.callbacks import ProfilerCallback
from pytorch_accelerated.trainer import Trainer
from tests.callbacks.runs import Die, DieAfter, StopAfter
from tests.support.reference import regression_data, tiny_trainer


def train(trainer: Trainer) -> None:
    """12 updates."""
    trainer.train(regression_data(12), 2, per_device_batch_size=2)


def optimizer_steps(folder: Path) -> int:
    trace = json.loads((folder / "trace_rank_0.json").read_text())
    assert "SGD" in (folder / "table_rank_0.txt").read_text()
    return sum(event["name"] == "Optimizer.step#SGD.step" for event in trace["traceEvents"])


@pytest.mark.parametrize("active", [1, 3, 9])
def test_the_trace_holds_as_many_updates_as_were_asked_for(active, tmp_path):
    train(tiny_trainer(ProfilerCallback(tmp_path / "new" / "folder", wait=2, warmup=1, active=active), seed=1))
    assert optimizer_steps(tmp_path / "new" / "folder") == active


@pytest.mark.parametrize("ending", [StopAfter(5), DieAfter(5)])
def test_a_run_that_ends_before_leaves_what_there_was_and_no_profiler_behind(ending, tmp_path):
    trainer = tiny_trainer(ProfilerCallback(tmp_path, wait=2, warmup=1, active=100), ending, seed=1)
    with contextlib.suppress(Die):
        train(trainer)
    assert not torch._C._autograd._profiler_enabled()
    assert optimizer_steps(tmp_path) == 2


@pytest.mark.gpu
def test_work_on_the_gpu_is_in_the_table(tmp_path):
    train(tiny_trainer(ProfilerCallback(tmp_path, wait=2, warmup=1, active=2), seed=1))
    assert "Self CUDA" in (tmp_path / "table_rank_0.txt").read_text()
