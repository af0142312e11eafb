"""Ends training runs by signals at any moment, lets them go on, and compares their end with that of a whole run.

A script. Its arguments: how many runs on one rank are ended, how many on two ranks of which one gets the signal, a
seed, and an empty folder. It prints one JSON object with what it did.
"""

import functools
import itertools
import json
import os
import random
import signal
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pytorch_accelerated import Trainer
from pytorch_accelerated.callbacks import TrainerCallback
from tests.ranks.signalling import train, train_on_ranks
from tests.support.forks import Fork, Outcome, fork_ranks

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)


class Ready(TrainerCallback):
    """Prints that a run has begun."""

    def on_training_run_start(self, trainer: Trainer, **kwargs: Any) -> None:
        print("ready")


def start_alone(folder: Path) -> list[Fork]:
    return [Fork(functools.partial(train, folder), folder / "log")]


def start_ranks(folder: Path) -> list[Fork]:
    forks = fork_ranks(functools.partial(train_on_ranks, folder, Ready()), 2, folder / "log")
    # A rank that ends before it has found the other would leave that waiting, with or without us.
    while not all("ready" in fork.read_lines() for fork in forks):
        time.sleep(0.005)
    return forks


def ends(outcomes: list[Outcome]) -> list[str]:
    """What the whole state of a run came to, by rank."""
    assert {outcome.status for outcome in outcomes} == {0}, outcomes
    return [outcome.lines[-1] for outcome in outcomes]


class Trials:
    """Runs that are ended and go on.

    Args:
        start: starts a run in a folder.
        folder: for all of them.
        dice: chance.
    """

    def __init__(self, start: Callable[[Path], list[Fork]], folder: Path, dice: random.Random) -> None:
        self.start, self.folder, self.dice = start, folder, dice
        self.seconds_to_exit: list[float] = []
        self.missed = 0
        self._run_whole("first")  # what comes first is slow
        self.end, self.seconds_of_run = self._run_whole("whole")

    def run(self, number: int) -> None:
        """Send a signal to the last rank of a run, and let it go on."""
        folder = self._new_folder(f"{number}")
        wanted = SIGNALS[number % len(SIGNALS)]
        forks = self.start(folder)
        time.sleep(self.dice.uniform(0, self.seconds_of_run))
        sent = time.perf_counter()
        os.kill(forks[-1].pid, wanted)
        outcomes = [fork.wait() for fork in forks]
        seconds = time.perf_counter() - sent
        if outcomes[-1].lines == ["KeyboardInterrupt: "]:
            return  # Python's own: it came before `train` was called
        if any(line.startswith("end ") for outcome in outcomes for line in outcome.lines):
            self.missed += 1  # the run was over already, on some rank
            self.seconds_of_run *= 0.9
        else:
            self.seconds_to_exit.append(seconds)
            assert {outcome.status for outcome in outcomes} == {128 + wanted}, outcomes
            stops = {line for outcome in outcomes for line in outcome.lines if line.startswith("stopped")}
            assert len(stops) <= 1, outcomes
        again = ends([fork.wait() for fork in self.start(folder)])
        assert again == self.end, f"ended differently in {folder}: {again}, not {self.end}"

    def figures(self) -> dict[str, Any]:
        times = sorted(self.seconds_to_exit)
        return {
            "signals that ended a run": len(times),
            "signals after its end": self.missed,
            "runs that ended differently": 0,
            "median seconds from signal to exit": round(statistics.median(times), 3),
            "99th percentile": round(times[min(len(times) - 1, int(0.99 * len(times)))], 3),
        }

    def _run_whole(self, name: str) -> tuple[list[str], float]:
        forks = self.start(self._new_folder(name))
        started = time.perf_counter()
        return ends([fork.wait() for fork in forks]), time.perf_counter() - started

    def _new_folder(self, name: str) -> Path:
        folder = self.folder / name
        folder.mkdir(parents=True)
        return folder


def main() -> None:
    alone, on_ranks, seed = map(int, sys.argv[1:4])
    folder, dice = Path(sys.argv[4]), random.Random(seed)
    figures = {}
    for name, start, count in [("one rank", start_alone, alone), ("one rank of two", start_ranks, on_ranks)]:
        trials = Trials(start, folder / name, dice)
        for number in itertools.count():
            if len(trials.seconds_to_exit) == count:
                break
            trials.run(number)
        figures[name] = trials.figures()
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
