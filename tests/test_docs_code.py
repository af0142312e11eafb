"""The Python code of pages that are scripts runs as it stands."""

import re
from pathlib import Path

import pytest

from tests.support.processes import REPOSITORY, run_script


@pytest.mark.parametrize(
    ("page", "shown"),
    [
        ("how_to/metrics.md", "evaluation_noisy_loss"),
        ("how_to/tracking.md", "Logged to tensorboard: runs"),
        ("how_to/before_training.md", "Suggested learning rate"),
        ("how_to/debugging.md", "Loss spike in epoch 3"),
    ],
)
def test_the_code_of_a_page_runs_as_it_stands(page: str, shown: str, tmp_path: Path) -> None:
    text = (REPOSITORY / "docs" / page).read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    output = run_script("\n".join(blocks), cwd=tmp_path).stdout
    assert shown in output
