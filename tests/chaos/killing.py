"""Ends training runs at any moment, lets them go on, and compares their end with that of a run that nobody ended.

A script. Its arguments: runs that are killed once, storms of kills, operations of the disk to die at (0: all of them),
whether states are saved in the background, a seed, and an empty folder. It prints one JSON object with what it did.

Every run is forked from this process, in which everything is imported already, so that a run takes a fraction of a
second. The kills are real (SIGKILL), and so are the writes; in `make chaos` the flushes are, too.
"""

import functools
import json
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pytorch_accelerated.callbacks import SaveTrainingStateCallback
from tests.chaos.size import size
from tests.checkpointing.faulty_disk import Operation, wrap_operations
from tests.support.forks import Fork
from tests.support.resuming import digests, everything, run
from tests.support.states import find_state, read_manifest

KILLS_OF_A_STORM = size(6, 15)
DEAD = 9  # the status of a process that ended itself


def train(folder: Path, background: bool) -> None:
    """A run with everything that has a state; it goes on from `folder`, and prints digests of its end."""
    os.chdir(folder)  # states name the paths of callbacks, which must be the same in all runs
    saver = SaveTrainingStateCallback(
        "states", save_every_n_steps=3, save_every_n_epochs=2, max_checkpoints=2, background=background
    )
    print(json.dumps(digests(everything(*run(Path(), saver, resume_from="states")))))


def die_at(number: int, moment: str, counter: list[int]) -> None:
    """End this process around the disk operation `number`, as soon as it comes."""
    one_at_a_time = threading.Lock()

    def wrapped(name: str, operation: Operation) -> Operation:
        def run(*args: Any) -> Any:
            with one_at_a_time:
                counter[0] += 1
                is_the_one = counter[0] == number
                if is_the_one and moment == "before":
                    os._exit(DEAD)
                result = operation(*args)
                if is_the_one:
                    os._exit(DEAD)
                return result

        return run

    wrap_operations(wrapped)


class Trial:
    """One run, however often it is ended and goes on.

    Args:
        folder: of the run.
        background: whether it saves in the background.
        end: the digests that it must end with, by part.
    """

    def __init__(self, folder: Path, background: bool, end: dict[str, str] | None = None) -> None:
        self.folder = folder
        self.folder.mkdir(parents=True)
        self.work = functools.partial(train, folder, background)
        self.expected_end = end
        self.updates = -1

    def start(self, work: Callable[[], object]) -> Fork:
        return Fork(work, self.folder / "log")

    def end_by_kill(self, seconds: float) -> bool:
        """Start it, and kill it after `seconds`. Returns whether it was still running."""
        fork = self.start(self.work)
        time.sleep(seconds)
        os.kill(fork.pid, signal.SIGKILL)
        outcome = fork.wait()
        self.check_states()
        return outcome.status == 128 + signal.SIGKILL

    def end_at(self, number: int, moment: str) -> bool:
        """Start it; it ends itself at an operation of the disk. Returns whether it came to that."""

        def work() -> None:
            die_at(number, moment, [0])
            self.work()

        outcome = self.start(work).wait()
        self.check_states()
        return outcome.status == DEAD

    def check_states(self) -> None:
        """No state that was there once is lost, unless a newer one has replaced it."""
        state = find_state(self.folder / "states")  # reads every byte
        updates = -1 if state is None else read_manifest(state).facts["updates"]
        assert updates >= self.updates, f"went back from update {self.updates} to {updates} in {self.folder}"
        self.updates = updates

    def finish(self) -> dict[str, str]:
        """Let it run to its end, which must be the expected one."""
        outcome = self.start(self.work).wait()
        assert outcome.status == 0, f"could not go on in {self.folder}: {outcome.lines}"
        end: dict[str, str] = json.loads(outcome.lines[-1])
        expected = self.expected_end or end
        different = [part for part, digest in end.items() if digest != expected[part]]
        assert not different, f"ended with another {', '.join(different)} in {self.folder}"
        return end


def main() -> None:
    kills, storms, operations, background, seed = map(int, sys.argv[1:6])
    parent = Path(sys.argv[6])
    dice = random.Random(seed)
    end = Trial(parent / "reference", bool(background)).finish()
    start = time.perf_counter()
    Trial(parent / "again", bool(background), end).finish()
    seconds_of_run = time.perf_counter() - start

    ended_before = 0
    for number in range(kills):
        latest = seconds_of_run
        while not (trial := Trial(parent / f"kill {number} {latest}", bool(background), end)).end_by_kill(
            dice.uniform(0, latest)
        ):
            ended_before += 1
            latest *= 0.8  # the machine is quicker now than it was
        trial.finish()
    in_storms = 0
    for number in range(storms):
        trial = Trial(parent / f"storm {number}", bool(background), end)
        for _ in range(KILLS_OF_A_STORM):
            in_storms += trial.end_by_kill(dice.uniform(0, 0.4 * seconds_of_run))
        trial.finish()

    begins = operations_that_begin_a_save(parent / "counted", bool(background))
    # From the third state on each one replaces another.
    numbers: Sequence[int] = range(begins[2], begins[3])
    if operations:
        numbers = sorted(dice.sample(numbers, operations))
    deaths = 0
    for number in numbers:
        for moment in ("before", "after"):
            trial = Trial(parent / f"operation {number} {moment}", bool(background), end)
            deaths += trial.end_at(number, moment)
            trial.finish()
    figures = {
        "runs killed once": kills,
        "runs that ended before their kill": ended_before,
        "storms": storms,
        "kills in storms": in_storms,
        "operations of a save": begins[3] - begins[2],
        "deaths around an operation": deaths,
        "states lost": 0,
        "runs that ended differently": 0,
    }
    print(json.dumps(figures))


def operations_that_begin_a_save(folder: Path, background: bool) -> list[int]:
    """The numbers, among all disk operations of a run, of those that make the folder of a state."""
    trial = Trial(folder, background)

    def work() -> None:
        counter, begins = [0], []

        def noted(name: str, operation: Operation) -> Operation:
            def create_folder(path: Path) -> None:
                if path.name.endswith(".partial"):
                    begins.append(counter[0])
                operation(path)

            return create_folder if name == "create_folder" else operation

        wrap_operations(noted)
        die_at(-1, "", counter)
        trial.work()
        print(json.dumps(begins))

    begins: list[int] = json.loads(trial.start(work).wait().lines[-1])
    return begins


if __name__ == "__main__":
    main()
