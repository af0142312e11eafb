"""What the README shows works, and both languages show the same."""

import json
import re
from pathlib import Path

import pytest
from benchmarks import summary

from tests.support.processes import REPOSITORY, run_script, run_under_torchrun

ENGLISH = (REPOSITORY / "README.md").read_text(encoding="utf-8")
CHINESE = (REPOSITORY / "README.zh-CN.md").read_text(encoding="utf-8")


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def test_the_code_of_the_readme_runs_as_it_stands(tmp_path: Path) -> None:
    quick_start, subclass, callback, seeing, saving, hugging_face = blocks(ENGLISH, "python")
    look_at_callback = """
print("measured:", trainer.run_history.get_latest_metric("accuracy"))
print(trainer.explain())
"""
    look_at_seen = """
print("watched:", max(trainer.run_history.get_metric_values("eval_accuracy")))
"""
    look_at_saved = """
assert torch.equal(stored.load(), trainer.predict(eval_set))
trainer.train(train_set, num_epochs=4, eval_dataset=eval_set, resume_from="states")
print("losses:", len(trainer.run_history.get_metric_values("eval_loss_epoch")))
"""
    look_at_hugging_face = """
print("accuracy of the other face:", accuracy)
assert len(list(Path("results").glob("checkpoint-*"))) == 2
"""
    script = quick_start + subclass + callback + look_at_callback + seeing + look_at_seen + saving + look_at_saved
    script += "from pathlib import Path\n" + hugging_face + look_at_hugging_face
    output = run_script(script, cwd=tmp_path).stdout
    accuracy = float(re.search(r"^accuracy: ([\d.]+)%", output, re.MULTILINE).group(1))  # type: ignore[union-attr]
    assert accuracy > 90
    assert (tmp_path / "digits.pt").is_file()
    measured = float(re.search(r"^measured: ([\d.]+)", output, re.MULTILINE).group(1))  # type: ignore[union-attr]
    assert measured > 0.9
    assert "on_eval_epoch_end" in output
    assert float(re.search(r"^watched: ([\d.]+)", output, re.MULTILINE).group(1)) > 0.9  # type: ignore[union-attr]
    assert all((tmp_path / name).is_file() for name in ("best_model.pt", "log.csv", "report.html"))
    assert "Preflight passed" in output
    assert "No training state in states: starting afresh" in output
    assert (tmp_path / "curves.png").is_file()
    assert "losses: 4" in output, "the run has not gone on where it was"
    assert float(re.search(r"other face: ([\d.]+)", output).group(1)) > 0.9  # type: ignore[union-attr]


@pytest.mark.processes
def test_on_two_processes_the_quick_start_prints_its_accuracy_once(tmp_path: Path) -> None:
    quick_start, *_ = blocks(ENGLISH, "python")
    output = run_under_torchrun(quick_start, 2, cwd=tmp_path)
    assert [told.count("accuracy:") for told in output.stdout_of_ranks] == [1, 0]
    assert "64 samples each (32 x 2 processes)" in output.stdout


def test_the_quick_start_is_twenty_lines_of_code_or_so() -> None:
    lines = [line for line in blocks(ENGLISH, "python")[0].splitlines() if line.strip()]
    assert len(lines) <= 25


def test_both_languages_show_the_same_code() -> None:
    assert blocks(CHINESE, "python") == blocks(ENGLISH, "python")
    without_comments = [[re.sub(r"\s*#.*", "", block) for block in blocks(text, "bash")] for text in (ENGLISH, CHINESE)]
    assert without_comments[0] == without_comments[1]


@pytest.mark.parametrize("text", [ENGLISH, CHINESE], ids=["english", "chinese"])
def test_every_link_leads_somewhere(text: str) -> None:
    targets = [target for target in re.findall(r"\]\(([^)]+)\)", text) if not target.startswith("http")]
    assert targets
    missing = [target for target in targets if not (REPOSITORY / target).exists()]
    assert not missing


@pytest.mark.parametrize("page", summary.ROWS)
def test_the_table_of_speeds_is_that_of_the_results(page: str) -> None:
    results = json.loads(summary.RESULTS.read_text(encoding="utf-8"))
    text = (REPOSITORY / page).read_text(encoding="utf-8")
    assert summary.with_table(text, summary.table(results, page)) == text
