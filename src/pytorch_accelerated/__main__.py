"""``python -m pytorch_accelerated``: the command line, which inspects and cleans up training states and compares runs.

Folders may be damaged or come from others, so their contents are displayed, but never trusted or executed.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path

from pytorch_accelerated.errors import PytorchAcceleratedError, SignalExit
from pytorch_accelerated.extras.commands import checkpoints, proving, runs
from pytorch_accelerated.extras.commands.command import PROGRAM, Outcome, add_command, json_text, print_line
from pytorch_accelerated.record.text import printable, show


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command, and return its exit code.

    0 for success, 1 for a negative result, 2 for an error, 3 for an error of the user's script.
    """
    options = _parser().parse_args(arguments)
    try:
        outcome = _run(options)
        if options.json:
            print(json_text(options.command, outcome.values), flush=True)
        return outcome.exit_code
    except BrokenPipeError:  # the reader of the output has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130


def _run(options: argparse.Namespace) -> Outcome:
    try:
        with _silent_stdout() if options.json else contextlib.nullcontext():
            outcome: Outcome = options.run(options)
        return outcome
    except (BrokenPipeError, SignalExit):
        raise
    except (Exception, SystemExit) as error:  # a script that ends itself has proved nothing
        runs_script = any(getattr(options, name, None) for name in ("place", "place_b"))
        expected = PytorchAcceleratedError if runs_script else (PytorchAcceleratedError, OSError)
        message = " ".join(str(error).split())
        if not isinstance(error, expected):
            traceback.print_exc()
        elif not options.json:
            show(printable(f"error: {message}"), file=sys.stderr)
        exit_code = 2 if isinstance(error, expected) else 3
        return Outcome({"error": {"type": type(error).__name__, "message": message}}, exit_code)


@contextlib.contextmanager
def _silent_stdout() -> Iterator[None]:
    """In the block, nothing is printed, neither by a script nor by its child processes."""
    stdout = os.dup(1)
    with open(os.devnull, "w", encoding="utf-8") as nothing, contextlib.redirect_stdout(nothing):
        os.dup2(nothing.fileno(), 1)
        try:
            yield
        finally:
            if sys.__stdout__ is not None:
                sys.__stdout__.flush()
            os.dup2(stdout, 1)
            os.close(stdout)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=PROGRAM, description="Tools for training runs.")
    topics = parser.add_subparsers(metavar="TOPIC", required=True)
    for module in (checkpoints, runs, proving):
        module.add_to(topics)
    add_command(topics, "guide", _guide, "print how to use the library, on one page for people and programs")
    return parser


def _guide(options: argparse.Namespace) -> Outcome:
    text = Path(__file__).with_name("guide.md").read_text(encoding="utf-8")
    for line in text.splitlines():
        print_line(line)
    return Outcome({"guide": text})


if __name__ == "__main__":
    sys.exit(main())
