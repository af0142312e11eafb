"""Runs with DeepSpeed on two CPU processes, beside transformers' Trainer with the same config."""

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.huggingface.runs import without_speed
from tests.support.processes import REPOSITORY, environment_on, run_script, run_under_torchrun

pytestmark = [
    pytest.mark.slow,
    pytest.mark.processes,
    pytest.mark.skipif(
        not all(importlib.util.find_spec(name) for name in ("deepspeed", "transformers")),
        reason="needs deepspeed and transformers: make deepspeed",
    ),
]

SCRIPT = REPOSITORY / "tests" / "ranks" / "huggingface_deepspeed.py"
CASES = [
    *("stage 0", "stage 1", "stage 2", "stage 3", "bf16 at stage 1", "bf16 at stage 2", "bf16 at stage 3", "sgd"),
    *("fp16 at stage 1", "fp16 at stage 2", "fp16 at stage 3"),
    *("optimizer of the config", "schedule of the config", "both of the config"),
]
# Checkpoints of transformers that are resumed here, by the config that resumes them.
RESUMED = [
    *("stage 0 from stage 0", "stage 1 from stage 1", "stage 2 from stage 2", "stage 3 from stage 3"),
    *("stage 3 from stage 2", "stage 1 from stage 3", "no DeepSpeed from stage 2", "no DeepSpeed from stage 3"),
    *("bf16 at stage 2 from bf16 at stage 2", "bf16 at stage 3 from bf16 at stage 3"),
    *("fp16 at stage 2 from fp16 at stage 2", "fp16 at stage 3 from fp16 at stage 3"),
    *("bf16 at stage 3 from bf16 at stage 2", "both of the config from both of the config"),
]
# The same operations on the same numbers; the mean of the losses of an update is taken in float64 here.
ROUNDING = 1e-5


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Of the results of each library."""
    return {library: tmp_path_factory.mktemp(library) for library in ("theirs", "ours")}


@pytest.fixture(scope="module")
def histories(folders: dict[str, Path]) -> dict[str, dict[str, list[dict[str, Any]]]]:
    """By library and case."""
    found: dict[str, dict[str, Any]] = {}
    for library, names in (("theirs", CASES), ("ours", CASES + RESUMED)):
        arguments = (folders[library], library, ",".join(names), folders["theirs"])
        run_under_torchrun(SCRIPT, 2, *arguments, env={"DS_ACCELERATOR": "cpu"})
        found[library] = {name: torch.load(folders[library] / f"{name}.pt") for name in names}
    return found


@pytest.mark.parametrize("name", CASES)
def test_logs_equal_those_of_transformers(name: str, histories: dict[str, Any]) -> None:
    ours, theirs = (without_speed(histories[library][name]) for library in ("ours", "theirs"))
    if name == "fp16 at stage 3":  # DeepSpeed's norm is off by how the scale has just grown
        assert ours[10].pop("grad_norm") == pytest.approx(2 * theirs[10].pop("grad_norm"), rel=ROUNDING)
    if name == "stage 0":  # where transformers asks DeepSpeed for the norm, which doesn't know it
        for entry in ours:
            entry.pop("grad_norm", None)
    if name.endswith("of the config"):  # there it logs the rate of the next update
        rates = [[entry.pop("learning_rate") for entry in logs if "loss" in entry] for logs in (ours, theirs)]
        assert rates[0][1:] == pytest.approx(rates[1][:-1], rel=ROUNDING)
    assert len(ours) == len(theirs) == 16
    for our_entry, their_entry in zip(ours, theirs, strict=True):
        assert our_entry == pytest.approx(their_entry, rel=ROUNDING)


@pytest.mark.parametrize("name", RESUMED)
def test_checkpoints_of_transformers_resume(name: str, histories: dict[str, Any]) -> None:
    ours = without_speed(histories["ours"][name])
    theirs = without_speed(histories["theirs"][name.partition(" from ")[2]])
    assert len(ours) == len(theirs) == 16
    for our_entry, their_entry in zip(ours[7:-1], theirs[7:-1], strict=True):  # the last is about this call alone
        common = {"loss", "eval_loss"}.intersection(our_entry, their_entry)
        assert common
        for key in common:
            assert our_entry[key] == pytest.approx(their_entry[key], rel=ROUNDING)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_updates_that_float16_skips_count_as_steps_and_change_the_scale_as_in_transformers(
    stage: int, histories: dict[str, Any], folders: dict[str, Path]
) -> None:
    """Each step has one `on_optimizer_step`; the schedule waits, and the scale grows after three good ones."""
    ours, theirs = (torch.load(folders[library] / f"fp16 at stage {stage}.ends.pt") for library in ("ours", "theirs"))
    assert [(step, scale) for step, scale, _ in ours] == [(step, scale) for step, scale, _ in theirs]
    assert [rate for *_, rate in ours] == pytest.approx([rate for *_, rate in theirs], rel=1e-12)
    scales = [scale for _, scale, _ in ours]
    assert scales == [2.0**power for power in (19, 18, 17, 16, 15, 15, 15, 15, 16, 15, 15, 15)]


@pytest.mark.parametrize(("device", "ranks"), [("cpu", 2), pytest.param("gpu", 1, marks=pytest.mark.gpu)])
def test_runs_evaluate_predict_resume_load_the_best_and_save_as_without_deepspeed(
    device: str, ranks: int, tmp_path: Path
) -> None:
    script = REPOSITORY / "tests" / "ranks" / "huggingface_deepspeed_face.py"
    output = run_under_torchrun(script, ranks, tmp_path, device, env=environment_on(device))
    assert output.stdout.count("done") == ranks


def test_the_scripts_of_the_page_run(tmp_path: Path) -> None:
    page = (REPOSITORY / "docs" / "how_to" / "deepspeed.md").read_text(encoding="utf-8")
    for name, text in re.findall(r"<!-- file: (\S+) -->\n```\w+\n(.*?)```", page, re.DOTALL):
        (tmp_path / name).write_text(text)
    environment = {"DS_ACCELERATOR": "cpu"}
    run_under_torchrun(tmp_path / "train.py", 2, cwd=tmp_path, env=environment)
    assert "tensor([" in run_script(tmp_path / "serve.py", cwd=tmp_path, env=environment).stdout
