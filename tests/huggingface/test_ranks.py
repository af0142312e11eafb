"""Two processes give what one gives."""

from pathlib import Path

import pytest
import torch

from tests.support.processes import REPOSITORY, run_on_ranks, run_script
from tests.support.resuming import assert_same

SCRIPT = REPOSITORY / "tests" / "ranks" / "huggingface.py"


@pytest.mark.processes
@pytest.mark.fact("Evaluating: in distributed runs too every row once, in order, the same on every process")
@pytest.mark.fact("Resuming: bit for bit on two processes, whose generators are in rng_state_<rank>.pth")
def test_two_processes_evaluate_predict_and_resume_as_one(tmp_path: Path) -> None:
    run_script(SCRIPT, tmp_path)
    output = run_on_ranks(SCRIPT, 2, tmp_path)
    assert output.stdout.count("done") == 2
    one, first, second = (torch.load(tmp_path / f"{name}.pt") for name in ("1-0", "2-0", "2-1"))
    assert_same(first, second)
    torch.testing.assert_close(first, one, rtol=1e-6, atol=1e-7)
