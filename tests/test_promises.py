"""What `benchmarks.promises` asks of every library, this one answers as the committed table says."""

import json
from pathlib import Path

import pytest
from benchmarks.promises.questions import QUESTIONS, Question, ask
from benchmarks.promises.reporting import table
from benchmarks.promises.work import Task

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
ANSWERS = json.loads((RESULTS / "promises.json").read_text(encoding="utf-8"))["answers"]


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("library", ["ours", "ours, Hugging Face API"])
@pytest.mark.parametrize("name", ["accumulation", "resuming"])
def test_we_keep_what_the_table_says(name: str, library: str, tmp_path: Path) -> None:
    answer = ask(QUESTIONS[name], library, tmp_path / "work")
    assert answer.is_kept, answer
    assert answer.figure == ANSWERS[name][library]["figure"]


def test_a_failed_process_is_an_answer_with_its_error(tmp_path: Path) -> None:
    def fails(asked):
        return asked.does(Task("no such work", rows=-1))

    answer = ask(Question({"en": "a number of rows below zero"}, fails), "ours", tmp_path / "work")
    assert not answer.is_kept
    assert answer.figure == "fails"
    assert "negative" in answer.error


def test_the_table_is_that_of_the_answers() -> None:
    assert set(ANSWERS) == set(QUESTIONS)
    assert table(ANSWERS, "en") in (RESULTS / "promises.md").read_text(encoding="utf-8")
