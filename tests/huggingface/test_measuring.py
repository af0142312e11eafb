"""Speed and memory, and determinism."""

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from pytorch_accelerated.huggingface.engine.determinism import enable_full_determinism
from pytorch_accelerated.huggingface.engine.measuring import MemoryMeter, speed_metrics
from tests.huggingface.runs import make_trainer

MEGABYTE = 2**20


@pytest.mark.fact("Logging: Runtime and samples, steps and tokens per second are logged under the name of the split")
@pytest.mark.parametrize("counts", [{}, {"num_samples": 64}, {"num_samples": 64, "num_steps": 8, "num_tokens": 640}])
def test_speeds_are_those_of_transformers(counts: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.trainer_utils import speed_metrics as genuine_metrics

    monkeypatch.setattr(time, "time", lambda: 1002.5)
    assert speed_metrics("eval", 1000.0, **counts) == genuine_metrics("eval", 1000.0, **counts)


def test_a_clock_that_stood_still_tells_no_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "time", lambda: 1000.0)
    assert speed_metrics("train", 1000.0, num_samples=3) == {"train_runtime": 0.0}


@pytest.mark.fact("Training: Memory is measured as <stage>_mem_cpu_alloc_delta, in bytes")
def test_memory_that_is_kept_is_measured() -> None:
    meter = MemoryMeter("train")
    kept = torch.ones(64 * MEGABYTE, dtype=torch.uint8)
    deltas = meter.stop()
    assert 32 * MEGABYTE < deltas["train_mem_cpu_alloc_delta"] < 128 * MEGABYTE
    assert kept.sum() == 64 * MEGABYTE


@pytest.fixture
def _settings_as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
    cudnn = torch.backends.cudnn
    before = cudnn.deterministic, cudnn.benchmark, torch.are_deterministic_algorithms_enabled()
    yield
    cudnn.deterministic, cudnn.benchmark = before[:2]
    torch.use_deterministic_algorithms(before[2])


@pytest.mark.usefixtures("_settings_as_before")
def test_full_determinism_seeds_and_refuses_other_algorithms() -> None:
    draws = []
    for _ in range(2):
        enable_full_determinism(3)
        draws.append(torch.rand(2).tolist())
    assert draws[0] == draws[1]
    assert torch.are_deterministic_algorithms_enabled()
    assert not torch.is_deterministic_algorithms_warn_only_enabled()
    assert torch.backends.cudnn.deterministic
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] in (":16:8", ":4096:8")
    enable_full_determinism(3, warn_only=True)
    assert torch.is_deterministic_algorithms_warn_only_enabled()


@pytest.mark.usefixtures("_settings_as_before")
@pytest.mark.fact("Arguments: full_determinism makes torch use deterministic algorithms only")
def test_the_argument_asks_for_it(tmp_path: Path) -> None:
    make_trainer(tmp_path)
    assert not torch.are_deterministic_algorithms_enabled()
    make_trainer(tmp_path, full_determinism=True)
    assert torch.are_deterministic_algorithms_enabled()
