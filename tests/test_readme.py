"""What the README shows works, and both languages show the same."""

import re
from pathlib import Path

import pytest

from tests.support.processes import REPOSITORY, run_script

ENGLISH = (REPOSITORY / "README.md").read_text(encoding="utf-8")
CHINESE = (REPOSITORY / "README.zh-CN.md").read_text(encoding="utf-8")


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def test_the_code_of_the_readme_runs_as_it_stands(tmp_path: Path) -> None:
    quick_start, subclass, callback = blocks(ENGLISH, "python")
    use = """
trainer = MixedLossTrainer(
    model, nn.CrossEntropyLoss(), torch.optim.AdamW(model.parameters()), callbacks=[AccuracyCallback]
)
trainer.train(train_set, num_epochs=1, eval_dataset=eval_set)
print("measured:", trainer.run_history.get_latest_metric("accuracy"))
print(trainer.explain())
"""
    output = run_script(quick_start + subclass + callback + use, cwd=tmp_path).stdout
    accuracy = float(re.search(r"^accuracy: ([\d.]+)%", output, re.MULTILINE).group(1))  # type: ignore[union-attr]
    assert accuracy > 90
    assert (tmp_path / "digits.pt").is_file()
    measured = float(re.search(r"^measured: ([\d.]+)", output, re.MULTILINE).group(1))  # type: ignore[union-attr]
    assert measured > 0.9
    assert "on_eval_epoch_end" in output


def test_the_quick_start_is_twenty_lines_of_code_or_so() -> None:
    lines = [line for line in blocks(ENGLISH, "python")[0].splitlines() if line.strip()]
    assert len(lines) <= 25


def test_both_languages_show_the_same_code() -> None:
    english, chinese = blocks(ENGLISH, "python"), blocks(CHINESE, "python")
    assert chinese == english[: len(chinese)]
    without_comments = [[re.sub(r"\s*#.*", "", block) for block in blocks(text, "bash")] for text in (ENGLISH, CHINESE)]
    assert without_comments[0] == without_comments[1]


@pytest.mark.parametrize("text", [ENGLISH, CHINESE], ids=["english", "chinese"])
def test_every_link_leads_somewhere(text: str) -> None:
    targets = [target for target in re.findall(r"\]\(([^)]+)\)", text) if not target.startswith("http")]
    assert targets
    missing = [target for target in targets if not (REPOSITORY / target).exists()]
    assert not missing
