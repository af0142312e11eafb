"""The commands ``diff``, ``replay``, ``measure``, ``branch``, ``prove``, which train a script's run, and ``eject``."""

from __future__ import annotations

import argparse
import functools
from pathlib import Path
from typing import Any

from pytorch_accelerated.extras import proving
from pytorch_accelerated.extras.commands.command import Outcome, add_command, print_line
from pytorch_accelerated.extras.proving import HELP, NOT_TAKEN, NOT_TAKEN_BY_BRANCH, function_at, make_run
from pytorch_accelerated.states.verify import read_manifest


def add_to(topics: Any) -> None:
    """Add the commands to the topics of the command line."""
    command = add_command(topics, "diff", _diff, "say where two runs part: settings, records, states, first update")
    help = "the folder of a run: of its training states, or with its page and the folder of its states"
    command.add_argument("a", type=Path, metavar="A", help=help)
    command.add_argument("b", type=Path, metavar="B", help="the same of another run")
    help = f"train both again to find the first update; {HELP}"
    command.add_argument("--run", dest="place", metavar="PLACE", help=help)
    command.add_argument("--run-b", dest="place_b", metavar="PLACE", help="the same for B; default: that of --run")
    help = "show an update of a run with training states: its rows, losses, gradient"
    command = add_command(topics, "replay", _replay, help)
    help = "the folder of the training states, or one of them"
    command.add_argument("states", type=Path, metavar="STATES", help=help)
    command.add_argument("update", type=int, metavar="UPDATE", help="the number of the update, from 1")
    command.add_argument("--run", dest="place", required=True, metavar="PLACE", help=HELP)
    command.add_argument("--debug", action="store_true", help="stop in the debugger before its forward pass")
    help = "train a run as a branch of another one: with its past up to an update, and a change from there on"
    command = add_command(topics, "branch", _branch, help)
    command.add_argument("states", type=Path, metavar="STATES", help="the folder of the training states of the trunk")
    command.add_argument("update", type=int, metavar="UPDATE", help="the last update that both have in common")
    command.add_argument("into", type=Path, metavar="INTO", help="the folder of the branch, where its run must save")
    command.add_argument("--run", dest="place", required=True, metavar="PLACE", help=f"the trunk; {HELP}")
    command.add_argument("--run-b", dest="place_b", required=True, metavar="PLACE", help="the same for the branch")
    help = "add a quantity to the history of a finished run, as if it had been logged"
    command = add_command(topics, "measure", _measure, help)
    command.add_argument("states", type=Path, metavar="STATES", help="the folder of the training states")
    help = "gets the trainer, and returns a number or a dict of numbers: SCRIPT.py:FUNCTION, or MODULE:FUNCTION"
    command.add_argument("function", metavar="FUNCTION", help=help)
    command.add_argument("--run", dest="place", required=True, metavar="PLACE", help=HELP)
    command.add_argument("--every", type=int, default=1, metavar="N", help="updates between two values; default: 1")
    command.add_argument("--processes", type=int, default=1, metavar="N", help="how many to train in; default: 1")
    help = "prove that a run gives the same numbers when it is repeated or resumed"
    command = add_command(topics, "prove", _prove, help)
    command.add_argument("--run", dest="place", required=True, metavar="PLACE", help=HELP)
    command.add_argument("--updates", type=int, default=20, metavar="N", help="how many updates; default: 20")
    help = "write a run as one PyTorch script without this library, which ends with the same bits"
    command = add_command(topics, "eject", _eject, help)
    command.add_argument("file", type=Path, metavar="FILE", help="the new script")
    command.add_argument("--run", dest="place", required=True, metavar="PLACE", help=HELP)


def _diff(options: argparse.Namespace) -> Outcome:
    places = options.place, options.place_b
    difference = proving.diff(options.a, options.b, *(place and functools.partial(make_run, place) for place in places))
    return _shown(difference, is_good=difference.is_equal is True)


def _replay(options: argparse.Namespace) -> Outcome:
    trainer, arguments = make_run(options.place, without=NOT_TAKEN)
    return _shown(trainer.replay(options.states, options.update, debug=options.debug, **arguments))


def _branch(options: argparse.Namespace) -> Outcome:
    trainer, arguments = make_run(options.place_b, without=NOT_TAKEN_BY_BRANCH)
    history = trainer.branch(options.states, options.update, options.into, trunk=options.place, **arguments)
    facts = read_manifest(options.into / f"branch_{options.update}").facts["branch_of"][-1]
    return Outcome({**facts, "into": options.into, "updates": history.updates_done})


def _measure(options: argparse.Namespace) -> Outcome:
    trainer, arguments = make_run(options.place, without=NOT_TAKEN)
    in_processes = {"processes": options.processes, "factory": options.place}
    given = arguments if options.processes == 1 else in_processes
    history = trainer.measure(options.states, function_at(options.function), every=options.every, **given)
    names = sorted(history.names_measured_afterwards)
    values = {name: [[each.update, each.value] for each in history.records if each.name == name] for name in names}
    for name, pairs in values.items():
        print_line(f"{name}: {len(pairs)} values, from {pairs[0][1]:.6g} to {pairs[-1][1]:.6g}")
    return Outcome({"measured": values})


def _prove(options: argparse.Namespace) -> Outcome:
    trainer, arguments = make_run(options.place, without=NOT_TAKEN)
    proof = trainer.prove(updates=options.updates, factory=options.place, **arguments)
    return _shown(proof, is_good=proof.is_exact)


def _eject(options: argparse.Namespace) -> Outcome:
    trainer, arguments = make_run(options.place)
    path = trainer.eject(options.file, **arguments)
    lines = len(path.read_text(encoding="utf-8").splitlines())
    print_line(f"Wrote {path}: {lines} lines, whose function `train` ends with the bits of this run.")
    return Outcome({"file": str(path), "lines": lines})


def _shown(found: Any, *, is_good: bool = True) -> Outcome:
    for line in str(found).splitlines():
        print_line(line)
    return Outcome(found.to_json(), exit_code=int(not is_good))
