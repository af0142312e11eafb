"""Ask all libraries: ``python -m benchmarks.promises [QUESTION ...] [--libraries NAME ...] [--output FOLDER]``."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from benchmarks.promises.libraries import LIBRARIES
from benchmarks.promises.questions import QUESTIONS, Answer, ask
from benchmarks.promises.reporting import write
from benchmarks.reporting import facts_of_run

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


if __name__ == "__main__":
    main()
