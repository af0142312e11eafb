"""What all commands share: their options, what they return, and how they print.

A command is a function of its options that prints what it finds, and returns the same as an `Outcome` for programs. A
module of commands has a function `add_to`, which `__main__` calls to add them to the parser.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, NamedTuple

from pytorch_accelerated.record.text import aligned, encodable, printable

PROGRAM = "python -m pytorch_accelerated"
_JSON_FORMAT = 1  # of all commands; if a key goes or changes its meaning, it becomes 2
_NOT_IN_JSON = {"NaN": "nan", "Infinity": "inf", "-Infinity": "-inf"}


class Outcome(NamedTuple):
    """What a command returns.

    Attributes:
        values: what it found, by name: plain values and paths.
        exit_code: 0 for success, 1 for a negative result.
    """

    values: dict[str, Any]
    exit_code: int = 0


def add_command(
    commands: Any, name: str, run: Callable[[argparse.Namespace], Outcome], help: str
) -> argparse.ArgumentParser:
    """Add a command, and return its parser for more arguments.

    Args:
        commands: what `add_subparsers` has returned.
        name: the word that calls it.
        run: the command.
        help: what it does, in a line that begins with a small letter.
    """
    command: argparse.ArgumentParser = commands.add_parser(name, help=help, description=f"{help[0].upper()}{help[1:]}.")
    command.add_argument("--json", action="store_true", help="print one JSON object for programs, and nothing else")
    command.set_defaults(run=run, command=command.prog.removeprefix(f"{PROGRAM} "))
    return command


def print_line(text: str = "") -> None:
    """Print a line of text, which is never truncated. A closed pipe is an error, so that the command ends."""
    print(encodable(printable(text), sys.stdout), flush=True)


def print_table(header: Sequence[str], rows: Iterable[Sequence[str]], numbers: Collection[str] = ()) -> None:
    """Print rows of text below a header; columns of `numbers` are right-aligned."""
    right = [place for place, title in enumerate(header) if title in numbers]
    for line in aligned([header, *([printable(cell) for cell in row] for row in rows)], right):
        print_line(line)


def json_text(command: str, values: dict[str, Any]) -> str:
    """The result of a command as one line of JSON. Numbers that JSON lacks are "nan", "inf" and "-inf".

    >>> json_text("show", {"loss": float("nan")})
    '{"format": 1, "command": "show", "loss": "nan"}'
    """
    text = json.dumps({"format": _JSON_FORMAT, "command": command, **values}, default=str)
    return json.dumps(json.loads(text, parse_constant=_NOT_IN_JSON.get))
