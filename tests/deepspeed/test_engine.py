"""Runs with DeepSpeed beside the same runs on plain DDP, and resumed from their states."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.processes import run_on_ranks
from tests.support.resuming import assert_same
from tests.support.zero import config

pytest.importorskip("deepspeed", reason="needs deepspeed: make deepspeed")
pytestmark = pytest.mark.processes
REPOSITORY = Path(__file__).parents[2]
RANKS = REPOSITORY / "tests" / "ranks"
TOLERANCE = 2e-5  # of float32 sums in another order, after 60 updates


def run(script: str, *arguments: object, ranks: int = 2) -> str:
    environment = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    return run_on_ranks(RANKS / script, ranks, *arguments, cwd=REPOSITORY, env=environment).stdout


@pytest.fixture(scope="module")
def on_ddp(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The run on plain DDP."""
    folder = tmp_path_factory.mktemp("ddp")
    run("deepspeed_states.py", folder, "null")
    results: dict[str, Any] = torch.load(folder / "results.pt")
    return results


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_each_stage_trains_like_ddp_and_resumes_to_the_bit(stage: int, tmp_path: Path, on_ddp: dict[str, Any]):
    output = run("deepspeed_states.py", tmp_path, json.dumps(config(stage)))
    assert output.count("all is well") == 2
    assert_same(torch.load(tmp_path / "results.pt"), on_ddp, tolerance=TOLERANCE)
