"""Runs example scripts of transformers with its Trainer and with ours, and writes the differences to a table.

    python scripts/transformers_scripts.py --folder FOLDER [--only run_glue.py] [--output TABLE.md]

FOLDER contains the scripts and their own imports. Get them from the repository of transformers (``examples/pytorch``),
at a version that fits the installed one. ``transformers_scripts.json`` lists the scripts with their models, data and
arguments. Models are tiny and random, data is generated, metrics come from `stand_ins/evaluate.py`: nothing is
downloaded.

For our side, one line is added below each import of a trainer or its arguments, and nothing else is changed. The log
histories and results of both sides must agree to a relative `TOLERANCE`; otherwise the exit code is 1.
"""

from __future__ import annotations

import argparse
import ast
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from scripts.stand_ins.tiny import make_data, make_model  # noqa: E402
from tests.support import torchvision_on_cpu  # noqa: E402

CASES = Path(__file__).with_suffix(".json")
TABLE = ROOT / "benchmarks" / "results" / "transformers_scripts.md"
TOLERANCE = 1e-4
OURS = {"Trainer", "TrainingArguments", "Seq2SeqTrainer", "Seq2SeqTrainingArguments"}
_OF_THE_CLOCK = ("_runtime", "_per_second", "_preparation_time", "total_flos")
_HEAD = """\
# Example scripts of transformers, with its Trainer and with ours

Written by `scripts/transformers_scripts.py`, which says how; `scripts/transformers_scripts.json` has the arguments.
transformers {transformers}, torch {torch}. Rows come in their order and nothing is dropped out, so both libraries
train on the same batches; masks and crops follow from the data on both sides. "Numbers" are those of the log history
and of `all_results.json`, without times. The largest relative difference between two numbers leaves out those that
differ on purpose.

| script | what changed | numbers | files of predictions | largest difference | differs on purpose |
| --- | --- | --- | --- | --- | --- |
"""


@dataclass(frozen=True)
class Outcome:
    """The output of a script.

    Attributes:
        numbers: by name and place, without times.
        texts: the files of predictions by name.
    """

    numbers: dict[str, Any]
    texts: dict[str, str]


def with_our_trainer(source: str) -> tuple[str, list[str]]:
    """A script with our trainer and arguments, and the lines that were added."""
    lines, added = source.splitlines(keepends=True), []
    for node in reversed(ast.parse(source).body):
        if isinstance(node, ast.ImportFrom) and str(node.module).partition(".")[0] == "transformers":
            names = sorted(OURS & {alias.name for alias in node.names})
            if names:
                line = f"from pytorch_accelerated.huggingface import {', '.join(names)}"
                lines.insert(node.end_lineno or 0, f"{line}\n")
                added.append(line)
    return "".join(lines), added


def run(script: Path, folder: Path, arguments: list[str], *, ours: bool) -> tuple[Outcome, list[str]]:
    """Run a script in `folder`.

    Raises:
        RuntimeError: if it fails, with the end of its output.
    """
    folder.mkdir(parents=True)
    changes = []
    for file in script.parent.glob("*.py"):
        text = file.read_text(encoding="utf-8")
        if ours:
            text, added = with_our_trainer(text)
            changes += added if file.name in (script.name, *_imported_by(script)) else []
        (folder / file.name).write_text(text, encoding="utf-8")
    output = folder / "output"
    stand_ins = Path(__file__).parent / "stand_ins"
    paths = [ROOT / "src", ROOT, stand_ins]
    environment = {
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(folder / "home"),
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
    }
    command = [sys.executable, stand_ins / "same_draws.py", folder / script.name, "--output_dir", output, *arguments]
    result = subprocess.run(
        list(map(str, command)),
        env={**os.environ, **environment},
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if result.returncode:
        raise RuntimeError(f"{script.name} with {'our' if ours else 'their'} trainer failed:\n{result.stdout[-3000:]}")
    state = json.loads((output / "trainer_state.json").read_text())
    results = json.loads((output / "all_results.json").read_text())
    numbers = dict(_numbers({"log_history": state["log_history"], "results": results}))
    texts = {path.name: path.read_text() for path in sorted(output.glob("*predict*")) if path.suffix == ".txt"}
    return Outcome(numbers, texts), changes


def largest_difference(ours: Outcome, theirs: Outcome, on_purpose: Collection[str] = ()) -> float:
    """The largest relative difference between two numbers; infinite if something is missing or a text differs.

    Args:
        ours: the outcome of our trainer.
        theirs: the outcome of transformers' trainer.
        on_purpose: numbers with these suffixes may differ.
    """
    if ours.numbers.keys() != theirs.numbers.keys() or ours.texts != theirs.texts:
        return math.inf
    names = [name for name in theirs.numbers if not name.endswith(tuple(on_purpose))]
    return max(_difference(ours.numbers[name], theirs.numbers[name]) for name in names)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the scripts and write the table. Return 1 if one failed or differs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, required=True, help="where the scripts are")
    parser.add_argument("--cases", type=Path, default=CASES, help="what each is run with")
    parser.add_argument("--only", nargs="*", help="scripts to run; rows of the others stay in the table")
    parser.add_argument("--output", type=Path, default=TABLE, help="the table")
    parser.add_argument("--keep", type=Path, help="a new folder for what the scripts write")
    options = parser.parse_args(arguments)
    torchvision_on_cpu.install()  # transformers imports it
    cases = json.loads(options.cases.read_text())
    work = options.keep or Path(tempfile.mkdtemp())
    rows, is_same = _rows_of(options.output) if options.only else {}, True
    for name, case in cases["scripts"].items():
        if options.only and name not in options.only:
            continue
        folder = work / Path(name).stem
        model = make_model(case["model"], folder / "model")
        data = make_data(case["data"], cases["rows"], folder / "data")
        words = ["--model_name_or_path", str(model), *data, *cases["common"].split(), *case["arguments"].split()]
        try:
            theirs, _ = run(options.folder / name, folder / "theirs", words, ours=False)
            ours, changes = run(options.folder / name, folder / "ours", words, ours=True)
        except RuntimeError as error:
            print(error)
            rows[name] = f"| `{name}` | | | | failed | |"
            _write(options.output, [rows[each] for each in cases["scripts"] if each in rows])
            is_same = False
            continue
        reasons = {**cases.get("on_purpose", {}), **case.get("on_purpose", {})}
        difference = largest_difference(ours, theirs, reasons)
        is_same &= difference <= TOLERANCE
        explanation = _explain(ours, theirs, reasons)
        lines = f"{len(changes)} line{'s'[: len(changes) != 1]} added"
        facts = [f"`{name}`", lines, len(theirs.numbers), len(theirs.texts), f"{difference:.1e}", explanation]
        rows[name] = f"| {' | '.join(map(str, facts))} |"
        print(rows[name], flush=True)
        _write(options.output, [rows[each] for each in cases["scripts"] if each in rows])
    if not options.keep:
        shutil.rmtree(work)
    return not is_same


def _rows_of(table: Path) -> dict[str, str]:
    """The rows of an existing table by script: those of scripts that are not run are kept."""
    lines = table.read_text(encoding="utf-8").splitlines() if table.exists() else []
    return {line.split("`")[1]: line for line in lines if line.startswith("| `")}


def _write(table: Path, rows: Sequence[str]) -> None:
    import torch
    import transformers

    head = _HEAD.format(transformers=transformers.__version__, torch=torch.__version__)
    table.write_text(head + "\n".join(rows) + "\n", encoding="utf-8")


def _imported_by(script: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(script.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            yield f"{node.module}.py"


def _numbers(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, item in value.items():
            if not key.endswith(_OF_THE_CLOCK):
                yield from _numbers(item, f"{name}.{key}")
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _numbers(item, f"{name}[{index}]")
    else:
        yield name, value


def _difference(ours: Any, theirs: Any) -> float:
    if ours == theirs:
        return 0.0
    if not all(isinstance(value, (int, float)) for value in (ours, theirs)):
        return math.inf
    return float(abs(ours - theirs) / max(abs(ours), abs(theirs)))


def _explain(ours: Outcome, theirs: Outcome, on_purpose: Mapping[str, str]) -> str:
    """Print the differences; return the intended ones, with the reasons."""
    reasons = []
    for name in sorted(ours.numbers.keys() | theirs.numbers.keys()):
        pair = [side.numbers.get(name, "nothing") for side in (ours, theirs)]
        if _difference(*pair) > TOLERANCE:
            print(f"  {name}: ours {pair[0]}, theirs {pair[1]}")
            reasons += [f"`{ending}`: {reason}" for ending, reason in on_purpose.items() if name.endswith(ending)]
    for name in sorted(ours.texts.keys() | theirs.texts.keys()):
        if ours.texts.get(name) != theirs.texts.get(name):
            print(f"  {name} differs")
    return "; ".join(dict.fromkeys(reasons))


if __name__ == "__main__":
    sys.exit(main())
