"""Kills runs around operations of their upload, resumes them on new machines, and compares their end.

A script. Its arguments: operations to die at (0: all of them), a seed, an empty folder, and a URL without states. It
prints one JSON object with what it did.
"""

import json
import os
import random
import signal
import sys
from pathlib import Path
from typing import Any

import s3fs  # noqa: F401  (imported once, for all forks)

from pytorch_accelerated.callbacks import SaveTrainingStateCallback, TrainerCallback
from pytorch_accelerated.extras.object_storage import Store
from tests.support.forks import Fork
from tests.support.resuming import digests, everything, run

OPERATIONS = ("put", "write", "delete")


class Wait(TrainerCallback):
    """Lets uploads keep pace, so that each run has the same operations; notes where the run was resumed."""

    resumed_at = -1

    def on_training_run_start(self, trainer: Any, **kwargs: Any) -> None:
        self.resumed_at = trainer.run_state.updates

    def on_optimizer_step_end(self, trainer: Any, **kwargs: Any) -> None:
        saves = trainer.run_context.control.saves
        saves.writer.wait()  # what follows a save: it starts uploads, and deletes old states
        for uploads in saves.uploads.values():
            if uploads._round is not None:
                uploads._round.result()


def train(folder: Path, url: str, machine: str, dies_at: int, moment: str) -> None:
    """A run that resumes from `url`, prints where, the number of its operations, and digests of its end."""
    done = [0]
    for name in OPERATIONS:

        def counted(*args: Any, work: Any = getattr(Store, name)) -> None:  # noqa: B008
            done[0] += 1
            for when in ("before", "after"):
                if done[0] == dies_at and when == moment:
                    os.kill(os.getpid(), signal.SIGKILL)
                if when == "before":
                    work(*args)

        setattr(Store, name, counted)
    folder.mkdir(exist_ok=True)
    os.chdir(folder)
    os.environ["XDG_CACHE_HOME"] = str(folder / machine)
    saver = SaveTrainingStateCallback(url, save_every_n_steps=3, max_checkpoints=1)
    end = digests(everything(*run(Path(), saver, wait := Wait(), resume_from=url)))
    print(json.dumps([wait.resumed_at, done[0], end]))


def main() -> None:
    number, seed, folder, url = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4]
    end = Fork(lambda: train(folder / "whole", f"{url}/whole", "first", 0, ""), folder / "log").wait()
    assert end.status == 0, end
    _, operations, expected = json.loads(end.lines[-1])
    chosen = random.Random(seed).sample(range(1, operations + 1), number) if number else range(1, operations + 1)
    resumed_at = []
    for operation in sorted(chosen):
        for moment in ("before", "after"):
            trial = f"{operation} {moment}"
            place = folder / trial, f"{url}/{operation}-{moment}"
            killed = Fork(lambda: train(*place, "first", operation, moment), folder / "log").wait()  # noqa: B023
            assert killed.status == 128 + signal.SIGKILL, killed
            for machine in ("second", "first"):  # the second has the end at the URL, the first a state of its own
                outcome = Fork(lambda: train(*place, machine, 0, ""), folder / "log").wait()  # noqa: B023
                assert outcome.status == 0, (trial, outcome)
                updates, _, found = json.loads(outcome.lines[-1])
                assert found == expected, trial
                resumed_at += [updates] if machine == "second" else []
    assert resumed_at == sorted(resumed_at), resumed_at  # no state that was there is lost
    print(json.dumps({"operations": operations, "kills": len(resumed_at), "states lost": 0}))


if __name__ == "__main__":
    main()
