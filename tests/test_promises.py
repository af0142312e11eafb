"""What `benchmarks.promises` asks of every library, this one answers as the committed table says."""

import json
from pathlib import Path

import pytest
from benchmarks.promises.questions import QUESTIONS, ask

from tests.chaos.size import in_release

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
ANSWERS = json.loads((RESULTS / "promises.json").read_text(encoding="utf-8"))["answers"]


@in_release
@pytest.mark.processes
@pytest.mark.parametrize("library", ["ours", "ours, Hugging Face API"])
@pytest.mark.parametrize("name", ["accumulation", "resuming"])
def test_we_keep_what_the_table_says(name: str, library: str, tmp_path: Path) -> None:
    answer = ask(QUESTIONS[name], library, tmp_path / "work")
    assert answer.is_kept, answer
    assert answer.figure == ANSWERS[name][library]["figure"]
