"""Starts a second run where a first one saves, many times: ``two_writers.py TRIALS FOLDER``. Prints what came of it."""

import functools
import json
import sys
import time
from pathlib import Path
from typing import Any

from tests.chaos.killing import train
from tests.checkpointing.faulty_disk import Operation, wrap_operations
from tests.support.forks import Fork
from tests.support.states import list_states, verify


def started(folder: Path, name: str) -> Fork:
    return Fork(functools.partial(train, folder, False), folder / name)


def train_until_second_is_over(folder: Path) -> None:
    """As `train`; before its first state is published, the run waits for a file ``second is over``."""

    def waiting(name: str, operation: Operation) -> Operation:
        def wait_and_act(*args: Any) -> Any:
            while name == "move" and not (folder / "second is over").exists():
                time.sleep(0.001)
            return operation(*args)

        return wait_and_act

    wrap_operations(waiting)
    train(folder, False)


def whole_run(folder: Path) -> list[str]:
    folder.mkdir()
    outcome = started(folder, "log").wait()
    assert outcome.status == 0, outcome
    return outcome.lines[-1:]


def main() -> None:
    trials, place = int(sys.argv[1]), Path(sys.argv[2])
    expected = whole_run(place / "whole")
    done = {"second runs": trials, "refused": 0, "first runs that ended differently": 0, "damaged states": 0}
    for number in range(trials):
        folder = place / str(number)
        folder.mkdir()
        first = Fork(functools.partial(train_until_second_is_over, folder), folder / "first")
        while not (folder / "states" / ".lock").exists():
            time.sleep(0.001)
        second = started(folder, "second").wait()
        done["refused"] += any("is saving to" in line and "CheckpointError" in line for line in second.lines)
        (folder / "second is over").touch()
        outcome = first.wait()
        done["first runs that ended differently"] += outcome.lines[-1:] != expected
        for state, _ in list_states(folder / "states"):
            verify(state)
        assert not (folder / "states" / ".lock").exists()
        # When the first one is over, the folder is free.
        assert started(folder, "third").wait().status == 0
    print(json.dumps(done))


if __name__ == "__main__":
    main()
