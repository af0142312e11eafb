"""Starts a second run where a first one saves, many times: ``two_writers.py TRIALS FOLDER``. Prints what came of it."""

import functools
import json
import sys
import time
from pathlib import Path

from pytorch_accelerated.checkpointing.verify import list_states, verify
from tests.chaos.killing import train
from tests.support.forks import Fork


def started(folder: Path, name: str) -> Fork:
    return Fork(functools.partial(train, folder, False), folder / name)


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
        first = started(folder, "first")
        while not (folder / "states" / ".lock").exists():
            time.sleep(0.001)
        second = started(folder, "second").wait()
        done["refused"] += any("is saving to" in line and "CheckpointError" in line for line in second.lines)
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
