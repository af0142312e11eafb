"""``python -m pytorch_accelerated``: the command line, which inspects and cleans up training states and compares runs.

Folders may be damaged or come from others, so their contents are displayed, but never trusted or executed.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import sys
from collections.abc import Sequence

from pytorch_accelerated.errors import PytorchAcceleratedError
from pytorch_accelerated.extras.commands import checkpoints, proving, runs
from pytorch_accelerated.extras.commands.command import PROGRAM, Outcome, json_text
from pytorch_accelerated.record.text import printable, show


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command, and return its exit code: 0 for success, 1 for a negative result, 2 for an error."""
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
        with contextlib.redirect_stdout(io.StringIO() if options.json else sys.stdout):  # JSON is all that is printed
            outcome: Outcome = options.run(options)
        return outcome
    except BrokenPipeError:
        raise
    except (PytorchAcceleratedError, OSError) as error:
        message = " ".join(str(error).split())
        if not options.json:
            show(printable(f"error: {message}"), file=sys.stderr)
        return Outcome({"error": {"type": type(error).__name__, "message": message}}, exit_code=2)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=PROGRAM, description="Tools for training runs.")
    topics = parser.add_subparsers(metavar="TOPIC", required=True)
    for module in (checkpoints, runs, proving):
        module.add_to(topics)
    return parser


if __name__ == "__main__":
    sys.exit(main())
