"""``python -m pytorch_accelerated``: the command line."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from pytorch_accelerated.checkpointing import tool
from pytorch_accelerated.checkpointing.policy import Retention
from pytorch_accelerated.errors import ConfigurationError, PytorchAcceleratedError
from pytorch_accelerated.progress.screen import Screen
from pytorch_accelerated.report.reading import write_comparison


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command, and return its exit code: 0 for success, 1 for a negative result, 2 for an error."""
    options = _parser().parse_args(arguments)
    try:
        return int(options.run(options))
    except BrokenPipeError:  # the reader of the output has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (PytorchAcceleratedError, OSError) as error:
        Screen(sys.stderr).line(f"error: {' '.join(str(error).split())}")
        return 2
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m pytorch_accelerated", description="Tools for training runs.")
    topics = parser.add_subparsers(metavar="TOPIC", required=True)
    checkpoints = topics.add_parser("checkpoints", help="inspect and clean up folders of training states")
    commands = checkpoints.add_subparsers(metavar="COMMAND", required=True)

    def add(name: str, help: str) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=help, description=f"{help[0].upper()}{help[1:]}.")
        command.add_argument("folder", type=Path, metavar="FOLDER", help="a training state, or a folder of several")
        return command

    add("list", "list the training states, oldest first").set_defaults(
        run=lambda options: tool.list_states(options.folder, Screen(sys.stdout))
    )
    add("verify", "read every byte and name each damaged file; exits with 0 only if there is none").set_defaults(
        run=lambda options: tool.verify_states(options.folder, Screen(sys.stdout))
    )
    add("show", "show the contents of a training state, or of the newest of several").set_defaults(
        run=lambda options: tool.show_state(options.folder, Screen(sys.stdout))
    )
    prune = add("prune", "delete training states, except those that any rule keeps, and the newest valid one")
    prune.set_defaults(run=_prune)
    prune.add_argument("--keep-last", type=int, required=True, metavar="N", help="keep the N newest")
    prune.add_argument("--keep-best", type=int, metavar="K", help="keep the K with the best values of --metric")
    prune.add_argument("--metric", metavar="NAME", help="a name in the run history, such as eval_loss_epoch")
    prune.add_argument("--greater-is-better", action="store_true", help="the greatest values of --metric are the best")
    prune.add_argument("--yes", action="store_true", help="delete without asking")
    help_of_compare = (
        "write a page that shows runs side by side: curves, best values, and what differs in their settings"
    )
    compare = topics.add_parser("compare", help=help_of_compare, description=f"W{help_of_compare[1:]}.")
    compare.set_defaults(run=_compare)
    help_of_run = (
        "a page of ReportCallback, a training state or a folder of several, or the output folder of a Hugging Face "
        "trainer"
    )
    compare.add_argument("runs", nargs="+", type=Path, metavar="RUN", help=help_of_run)
    compare.add_argument("--output", type=Path, default=Path("compare.html"), metavar="FILE", help="the page to write")
    return parser


def _compare(options: argparse.Namespace) -> int:
    write_comparison(options.runs, options.output)
    Screen(sys.stdout).line(f"Comparison: {options.output}")
    return 0


def _prune(options: argparse.Namespace) -> int:
    if (options.keep_best is None) != (options.metric is None):
        raise ConfigurationError("Give --keep-best and --metric together: which states are best depends on the metric.")
    retention = Retention(last=options.keep_last, best=options.keep_best, greater_is_better=options.greater_is_better)
    plan = tool.plan_prune(options.folder, retention, options.metric)
    return tool.prune(plan, Screen(sys.stdout), is_agreed=lambda question: options.yes or _ask(question))


def _ask(question: str) -> bool:
    try:
        return input(f"{question} [y/N] ").strip().lower() in ("y", "yes")
    except EOFError:
        print(file=sys.stderr)
        raise ConfigurationError("There is no input to confirm it. Pass --yes to delete without asking.") from None


if __name__ == "__main__":
    sys.exit(main())
