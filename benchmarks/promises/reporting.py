"""The answers as a file for programs, and as a table for readers."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from benchmarks.promises.questions import FLIPS, KILLS, QUESTIONS, Answer
from benchmarks.reporting import row_of


def write(folder: Path, answers: dict[str, dict[str, Answer]], facts: dict[str, Any]) -> None:
    """Write ``promises.json`` and ``promises.md`` into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    stored = {**facts, "answers": {name: {by: a._asdict() for by, a in of.items()} for name, of in answers.items()}}
    (folder / "promises.json").write_text(json.dumps(stored, indent=1) + "\n", encoding="utf-8")
    text = [
        "# What is taken for granted",
        "\n".join(f"- {name}: {value}" for name, value in facts.items() if name != "repeats"),
        table(stored["answers"], "en"),
        f"A dash: the library offers nothing for it. {FLIPS} checkpoints with one flipped bit each, anywhere "
        f"in their files; {KILLS} kills, each while a checkpoint of 20 MB or more was being written. All keep "
        "one checkpoint. After such a kill, transformers still has the one before, but "
        "`resume_from_checkpoint=True` chooses the incomplete one; ignite has removed the one before; skorch "
        "has overwritten it. ignite runs with its deterministic engine. `benchmarks/promises` has each "
        "library's code.",
    ]
    (folder / "promises.md").write_text("\n\n".join(text) + "\n", encoding="utf-8")


def table(answers: dict[str, Any], language: str) -> str:
    """The answers as Markdown, what is kept in bold.

    Args:
        answers: those of ``promises.json``.
        language: "en" or "zh".
    """
    libraries = list(next(iter(answers.values())))
    in_language = _in_chinese if language == "zh" else _for_visitors
    rows = [row_of(["", *map(in_language, libraries)]), row_of(["---"] * (len(libraries) + 1))]
    for name, of in answers.items():
        figures = [in_language(of[by]["figure"]) for by in libraries]
        kept = [of[by]["is_kept"] for by in libraries]
        cells = [f"**{figure}**" if is_kept else figure for figure, is_kept in zip(figures, kept, strict=True)]
        rows.append(row_of([QUESTIONS[name].texts[language], *cells]))
    return "\n".join(rows)


_CHINESE = {
    "same bits": "逐位相同",
    "yes": "是",
    "fails": "失败",
    "(.*) off": r"偏差 \1",
    "(.*) of (.*)": r"\1 / \2",
    "ours": "本库",
    "ours, Hugging Face API": "本库，Hugging Face API",
}


def _for_visitors(cell: str) -> str:
    return re.sub("^ours", "this library", cell)


def _in_chinese(cell: str) -> str:
    for english, chinese in _CHINESE.items():
        if match := re.fullmatch(english, cell):
            return match.expand(chinese)
    return cell
