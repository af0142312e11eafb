"""Runs with DeepSpeed beside the same runs on plain DDP, and resumed from their states."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.chaos.record import record
from tests.chaos.size import size
from tests.support.processes import environment_on, run_on_ranks, run_under_torchrun
from tests.support.resuming import assert_same
from tests.support.states import find_state
from tests.support.zero import config

pytest.importorskip(
    "deepspeed", reason="needs deepspeed: make deepspeed, then make gpu GPU_PYTHON=.venv-deepspeed/bin/python on a GPU"
)
pytestmark = pytest.mark.processes
REPOSITORY = Path(__file__).parents[2]
RANKS = REPOSITORY / "tests" / "ranks"
TOLERANCE = 2e-5  # of float32 sums in another order, after 60 updates


def outputs_of(script: str, *arguments: object, ranks: int = 2) -> tuple[str, ...]:
    environment = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    return run_on_ranks(RANKS / script, ranks, *arguments, cwd=REPOSITORY, env=environment).stdout_of_ranks


def run(script: str, *arguments: object, ranks: int = 2) -> str:
    return "".join(outputs_of(script, *arguments, ranks=ranks))


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


@pytest.mark.parametrize("stages", ["0,1,2", "3"])
def test_updates_are_those_of_a_loop_by_hand_and_what_cannot_work_is_refused(stages: str, tmp_path: Path):
    assert run("deepspeed_parts.py", tmp_path, stages).count("all is well") == 2


def assert_like_plain(folder: Path, kinds: Iterable[str]) -> None:
    plain = torch.load(folder / "plain.pt")["history"]
    for kind in kinds:
        is_exact = kind in ("zero_2", "zero_3", "offload_1", "offload_2")
        history = torch.load(folder / f"{kind}.pt")["history"]
        assert_same(history, plain, kind, tolerance=TOLERANCE if is_exact else 0.02)  # bfloat16 has 8 bits


def test_offloaded_and_16_bit_runs_resume_to_the_bit(tmp_path: Path):
    kinds = ["offload_1", "offload_2", "bf16_0", "bf16_1", "bf16_2", "bf16_3", "offload_3"]
    assert run("deepspeed_kinds.py", tmp_path, ",".join(["plain", *kinds])).count("all is well") == 2
    assert_like_plain(tmp_path, kinds)


@pytest.mark.parametrize("device", ["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
def test_one_process_trains_like_a_plain_one_and_resumes_to_the_bit(device: str, tmp_path: Path):
    kinds = ["zero_2", "zero_3", "offload_2", "offload_3", "bf16_2", "bf16_3"]
    arguments = tmp_path, ",".join(["plain", *kinds, "fp16_2", "fp16_3"])
    run_under_torchrun(RANKS / "deepspeed_kinds.py", 1, *arguments, env=environment_on(device))
    assert_like_plain(tmp_path, kinds)
    assert_16_bit_floats_alike(tmp_path)


def assert_16_bit_floats_alike(folder: Path) -> None:
    stage_2, stage_3 = (torch.load(folder / f"fp16_{stage}.pt") for stage in (2, 3))
    assert stage_2["skipped"] == stage_3["skipped"] > 0
    assert_same(stage_3["history"], stage_2["history"], tolerance=1e-2)


def test_updates_that_float16_skips_are_counted_and_skipped_again_after_a_resume(tmp_path: Path):
    assert run("deepspeed_kinds.py", tmp_path, "fp16_0,fp16_2,fp16_3").count("all is well") == 2
    assert_16_bit_floats_alike(tmp_path)


def test_the_optimizer_of_the_config_trains_and_resumes(tmp_path: Path):
    assert run("deepspeed_kinds.py", tmp_path, "optimizer_0,optimizer_2,optimizer_3").count("all is well") == 2


def test_a_state_resumes_on_another_number_of_ranks_at_another_stage_and_without_deepspeed(tmp_path: Path):
    def results(name: str, state: Path, settings: Any, ranks: int) -> dict[str, Any]:
        run("deepspeed_elsewhere.py", tmp_path / name, state, json.dumps(settings), ranks=ranks)
        loaded: dict[str, Any] = torch.load(tmp_path / name)
        return loaded

    state, plain_state = tmp_path / "of_stage_3" / "step_30", tmp_path / "of_ddp" / "step_30"
    expected = results("whole.pt", state, config(3), 2)
    results("plain.pt", plain_state, None, 2)
    elsewhere: list[tuple[Path, Any, int]] = [
        (state, config(1), 1),
        (state, config(2), 3),
        (state, None, 2),
        (plain_state, config(3), 2),
        (plain_state, config(1), 3),
    ]
    for number, (saved, settings, ranks) in enumerate(elsewhere):
        assert_same(results(f"{number}.pt", saved, settings, ranks), expected, str(number), tolerance=TOLERANCE)


def test_pieces_finds_private_members_of_deepspeed():
    assert run("deepspeed_members.py").count("all is well") == 2


@pytest.mark.parametrize("stage", [2, 3])
def test_a_run_that_is_killed_around_saves_loses_no_state_and_ends_the_same(stage: int, tmp_path: Path):
    settings = json.dumps(config(stage))
    outputs = outputs_of("deepspeed_dying.py", tmp_path / "whole", settings, -1, 0)
    operations = [int(text.split()[-1]) for text in outputs]
    expected = torch.load(tmp_path / "whole" / "results.pt")
    count = size(2, 15)
    deaths = [(number % 2, operations[number % 2] * (number + 1) // (count + 1)) for number in range(count)]
    for rank, at in deaths:
        folder = tmp_path / f"{rank}_{at}"
        with pytest.raises(AssertionError, match="SIGKILL"):
            run("deepspeed_dying.py", folder, settings, rank, at)
        saved = len(list((folder / "states").glob("step_*")))
        assert find_state(folder / "states") is not None or at < operations[rank] // 10, (at, saved)
        run("deepspeed_dying.py", folder, settings, -1, 0)
        assert_same(torch.load(folder / "results.pt"), expected, str(folder))
    record("rank killed around a save of DeepSpeed", {"kills": len(deaths), "states lost": 0})


@pytest.mark.parametrize("way", ["launch", "accelerator"])
def test_accelerate_asks_for_deepspeed_by_its_variables_or_by_a_plugin(way: str):
    assert run("deepspeed_asked.py", way).count("all is well") == 2
