"""Trainers of other packages, which derive from transformers' Trainer, log the same numbers on ours."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes import run_script

PACKAGES = [name for name in ("trl", "sentence_transformers", "setfit") if importlib.util.find_spec(name) is not None]
JOBS = {
    "sft": "trl",
    "dpo": "trl",
    "grpo": "trl",
    "rloo": "trl",
    "sentences": "sentence_transformers",
    "few_shots": "setfit",
}

pytestmark = pytest.mark.skipif(not PACKAGES, reason="none of the packages is installed: the extra `downstream`")


@pytest.fixture(scope="module")
def logged(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """The log histories of all jobs, of each library in a process of its own."""
    script = Path(__file__).with_name("jobs.py")
    folder = tmp_path_factory.mktemp("runs")
    outputs = {each: run_script(script, each, folder / each, *PACKAGES) for each in ("ours", "theirs")}
    return {library: json.loads(output.stdout.splitlines()[-1]) for library, output in outputs.items()}


@pytest.mark.processes
@pytest.mark.parametrize("job", JOBS)
def test_a_packages_trainer_logs_the_same(job: str, logged: dict[str, dict[str, Any]]) -> None:
    if JOBS[job] not in PACKAGES:
        pytest.skip(f"{JOBS[job]} is not installed")
    ours, theirs = (logged[library][job] for library in ("ours", "theirs"))
    assert len(ours) == len(theirs) > 3
    for our_entry, their_entry in zip(ours, theirs, strict=True):
        # Losses of embeddings that have become equal are a few units in the last place of a one.
        assert our_entry == pytest.approx(their_entry, rel=1e-5, abs=1e-6)
