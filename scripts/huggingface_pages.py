"""Writes the pages about the Hugging Face API that follow from code: its arguments, and what its tests show.

    python scripts/huggingface_pages.py

A test fails where a page is not up to date.
"""

from __future__ import annotations

import ast
import dataclasses
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from pytorch_accelerated.huggingface import Seq2SeqTrainingArguments, TrainingArguments  # noqa: E402
from pytorch_accelerated.huggingface.arguments.argument import Argument, arguments_of  # noqa: E402

ARGUMENTS_PAGE = ROOT / "docs" / "reference" / "huggingface_arguments.md"
FACTS_PAGE = ROOT / "tests" / "huggingface" / "facts.md"
TESTS = ROOT / "tests" / "huggingface"

_ARGUMENTS_HEAD = """\
# The arguments of the Hugging Face API

Written by `scripts/huggingface_pages.py`; change the code instead.

`pytorch_accelerated.huggingface.TrainingArguments` has the names and defaults of `transformers` 5.23, wherever the
loop can do what they say. No argument is ignored: using one that is unsupported is an error that says why, and what to
do instead. The last column is the equivalent for the native `pytorch_accelerated.Trainer`; `train(...)` is its method,
and callbacks come from `pytorch_accelerated.callbacks`.

## Supported arguments
"""
_SEQ2SEQ_HEAD = """\

## Further arguments of Seq2SeqTrainingArguments
"""
_UNSUPPORTED_HEAD = """\

## Unsupported arguments

Arguments of `transformers` 5.23, and of older versions that scripts may still use. Scripts may give them the values
that ask for nothing; reading an argument that was left out returns the first of these.
"""
_FACTS_HEAD = """\
# What the tests show about the Hugging Face API

Written by `scripts/huggingface_pages.py` from the markers `fact` of the tests in `tests/huggingface`.
"""


@dataclasses.dataclass(frozen=True)
class Fact:
    """What a test shows: a section, a sentence, and the test's place."""

    section: str
    sentence: str
    test: str


def arguments_page() -> str:
    """Every argument, with its meaning or the reason why it is unsupported."""
    common, of_seq2seq = (arguments_of(kind) for kind in (TrainingArguments, Seq2SeqTrainingArguments))
    help_of = {field.name: field.metadata["help"] for field in dataclasses.fields(Seq2SeqTrainingArguments)}
    columns = {name: (f"`{name}`", _default(one), help_of[name], one.native) for name, one in of_seq2seq.items()}
    unsupported = [
        (f"`{name}`", ", ".join(f"`{value!r}`" for value in (one.default, *one.also)), one.why_unsupported)
        for name, one in common.items()
        if one.why_unsupported
    ]
    return "\n".join(
        [
            _ARGUMENTS_HEAD,
            *_table(
                ("argument", "default", "meaning", "native `Trainer`"),
                [columns[name] for name, one in common.items() if not one.why_unsupported],
            ),
            _SEQ2SEQ_HEAD,
            *_table(
                ("argument", "default", "meaning"),
                [columns[name][:3] for name in of_seq2seq if name not in common],
            ),
            _UNSUPPORTED_HEAD,
            *_table(("argument", "asks for nothing", "why, and what to do instead"), unsupported),
            "",
        ]
    )


def facts_page() -> str:
    """Every fact, with the tests that show it."""
    tests_of: dict[str, dict[str, list[str]]] = {}
    for fact in sorted(facts(TESTS), key=lambda fact: (fact.section, fact.sentence, fact.test)):
        tests_of.setdefault(fact.section, {}).setdefault(fact.sentence, []).append(fact.test)
    lines = [_FACTS_HEAD]
    for section, tests_of_sentence in tests_of.items():
        lines += [f"## {section}", ""]
        for sentence, tests in tests_of_sentence.items():
            lines += [f"- {sentence}", *(f"  `{test}`" for test in tests)]
        lines.append("")
    return "\n".join(lines)


def facts(folder: Path) -> Iterator[Fact]:
    """The facts that the tests in `folder` are marked with, as ``section: sentence``.

    Raises:
        ValueError: if a marker has no such text.
    """
    for file in sorted(folder.glob("test_*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.FunctionDef):
                continue
            for decorator in node.decorator_list:
                if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == "pytest.mark.fact":
                    yield _fact(decorator, f"{file.name}::{node.name}")


def _fact(marker: ast.Call, test: str) -> Fact:
    arguments = [argument.value for argument in marker.args if isinstance(argument, ast.Constant)]
    section, colon, sentence = str(arguments[0] if len(arguments) == 1 else "").partition(": ")
    if not (section and colon and sentence):
        raise ValueError(f"{test} is marked with {ast.unparse(marker)}: give one text such as 'Section: a sentence'.")
    return Fact(section, sentence, test)


def _default(argument: Argument) -> str:
    return "" if argument.default is None else f"`{argument.default!r}`"


def _table(header: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> list[str]:
    return [f"| {' | '.join(row)} |" for row in [header, ("---",) * len(header), *rows]]


if __name__ == "__main__":
    ARGUMENTS_PAGE.write_text(arguments_page(), encoding="utf-8")
    FACTS_PAGE.write_text(facts_page(), encoding="utf-8")
