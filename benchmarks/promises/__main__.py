"""Ask all libraries: ``python -m benchmarks.promises [QUESTION ...] [--libraries NAME ...] [--output FOLDER]``."""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.promises.libraries import LIBRARIES
from benchmarks.promises.questions import FLIPS, KILLS, QUESTIONS, Answer, ask
from benchmarks.reporting import facts_of_run, row_of

RESULTS = Path(__file__).parents[1] / "results"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.promises", description=__doc__)
    parser.add_argument("questions", nargs="*", metavar="QUESTION", help=f"default: all of {', '.join(QUESTIONS)}")
    parser.add_argument("--libraries", nargs="+", default=list(LIBRARIES), choices=list(LIBRARIES))
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder for the results")
    options = parser.parse_args()
    unknown = [name for name in options.questions if name not in QUESTIONS]
    if unknown:
        parser.error(f"there is no question {unknown[0]!r}")
    answers: dict[str, dict[str, Answer]] = {}
    for name in options.questions or QUESTIONS:
        answers[name] = {}
        for library in options.libraries:
            with tempfile.TemporaryDirectory() as folder:
                answers[name][library] = answer = ask(QUESTIONS[name], library, Path(folder) / "work")
            print(f"{name}: {library}: {answer.figure}\n{answer.error}".rstrip(), flush=True)
    facts = facts_of_run(command="python -m benchmarks.promises", repeats=1, left_out=[])
    write(options.output, answers, facts)


def write(folder: Path, answers: dict[str, dict[str, Answer]], facts: dict[str, Any]) -> None:
    """Write ``promises.json`` and ``promises.md`` into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    stored = {**facts, "answers": {name: {by: a._asdict() for by, a in of.items()} for name, of in answers.items()}}
    (folder / "promises.json").write_text(json.dumps(stored, indent=1) + "\n", encoding="utf-8")
    text = [
        "# What is taken for granted",
        "\n".join(f"- {name}: {value}" for name, value in facts.items() if name != "repeats"),
        table(stored["answers"]),
        f"A dash: the library offers nothing for it. {FLIPS} checkpoints with one flipped bit each, anywhere in their "
        f"files; {KILLS} kills, each while a checkpoint of 20 MB was being written. `benchmarks/promises` has each "
        "library's code. transformers accumulates exactly if the loss is summed and divided by the "
        "`num_items_in_batch` that it passes; here the model returns its mean loss, as models outside of it do. "
        "ignite runs with its deterministic engine.",
    ]
    (folder / "promises.md").write_text("\n\n".join(text) + "\n", encoding="utf-8")


def table(answers: dict[str, Any]) -> str:
    """The answers as Markdown, what is kept in bold."""
    libraries = list(next(iter(answers.values())))
    rows = [row_of(["", *libraries]), row_of(["---"] * (len(libraries) + 1))]
    for name, of in answers.items():
        cells = [f"**{of[by]['figure']}**" if of[by]["is_kept"] else of[by]["figure"] for by in libraries]
        rows.append(row_of([QUESTIONS[name].text, *cells]))
    return "\n".join(rows)


if __name__ == "__main__":
    main()
