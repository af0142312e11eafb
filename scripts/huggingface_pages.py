"""Writes the pages about the Hugging Face face that follow from code: its arguments, and what its tests show.

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

from pytorch_accelerated.huggingface.arguments.training_arguments import TrainingArguments  # noqa: E402
from pytorch_accelerated.huggingface.arguments.unsupported import NOT_TAKEN_OVER  # noqa: E402
from pytorch_accelerated.huggingface.training_args_seq2seq import Seq2SeqTrainingArguments  # noqa: E402
from scripts.native_equivalents import NATIVE_EQUIVALENTS  # noqa: E402

ARGUMENTS_PAGE = ROOT / "docs" / "huggingface_arguments.md"
FACTS_PAGE = ROOT / "docs" / "huggingface_facts.md"
TESTS = ROOT / "tests" / "huggingface"

_ARGUMENTS_HEAD = """\
# The arguments of the Hugging Face face

Written by `scripts/huggingface_pages.py`; change the code instead.

`pytorch_accelerated.huggingface.TrainingArguments` has the names and defaults of `transformers` 5.23, wherever the
loop can do what they say. An argument that would do nothing does not exist: asking for one is an error that says why,
and what to do instead. The last column has what does the same where the native `pytorch_accelerated.Trainer` is used;
`train(...)` is its method, and callbacks come from `pytorch_accelerated.callbacks`.

## Arguments that there are
"""
_SEQ2SEQ_HEAD = """\

## Arguments that Seq2SeqTrainingArguments has besides
"""
_REFUSED_HEAD = """\

## Arguments that are not taken over

Those of `transformers` 5.23, and of older versions that scripts may still have. With the value that asks for nothing
they may be given, and reading one gives that value.
"""
_FACTS_HEAD = """\
# What the tests show of the Hugging Face face

Written by `scripts/huggingface_pages.py` from the markers `fact` of the tests in `tests/huggingface`.
"""


@dataclasses.dataclass(frozen=True)
class Fact:
    """What a test shows: a section, a sentence, and the test's place."""

    section: str
    sentence: str
    test: str


def arguments_page() -> str:
    """Every argument, with what it means here or why it is not taken over."""
    taken = [
        (f"`{field.name}`", _default(field), field.metadata["help"], _native_equivalent(field)) for field in _fields()
    ]
    of_seq2seq = [
        (f"`{field.name}`", _default(field), field.metadata["help"])
        for field in dataclasses.fields(Seq2SeqTrainingArguments)
        if field.name not in {each.name for each in _fields()}
    ]
    refused = [
        (f"`{name}`", ", ".join(f"`{value!r}`" for value in (entry.off, *entry.also)), f"{entry.reason} {entry.remedy}")
        for name, entry in NOT_TAKEN_OVER.items()
    ]
    return "\n".join(
        [
            _ARGUMENTS_HEAD,
            *_table(("argument", "default", "meaning", "of the native `Trainer`"), taken),
            _SEQ2SEQ_HEAD,
            *_table(("argument", "default", "meaning"), of_seq2seq),
            _REFUSED_HEAD,
            *_table(("argument", "asks for nothing", "why, and what to do instead"), refused),
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


def _fields() -> list[dataclasses.Field[object]]:
    return [field for field in dataclasses.fields(TrainingArguments) if field.name not in NOT_TAKEN_OVER]


def _default(field: dataclasses.Field[object]) -> str:
    default = field.default_factory() if callable(field.default_factory) else field.default
    return "" if default is None else f"`{default!r}`"


def _native_equivalent(field: dataclasses.Field[object]) -> str:
    is_other_name = field.metadata["help"].startswith("The same as ")
    return "" if is_other_name else NATIVE_EQUIVALENTS[field.name]


def _table(header: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> list[str]:
    return [f"| {' | '.join(row)} |" for row in [header, ("---",) * len(header), *rows]]


if __name__ == "__main__":
    ARGUMENTS_PAGE.write_text(arguments_page(), encoding="utf-8")
    FACTS_PAGE.write_text(facts_page(), encoding="utf-8")
