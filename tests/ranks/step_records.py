"""Step records on any number of ranks: ``step_records.py FOLDER STAGE``.

"killed": the processes kill themselves within an epoch, some updates after a save. "resumed": the run that resumes has
records, and files of them, as a run that was never interrupted, on every rank; losses are means over all ranks, whose
shares differ. "fewer": one process resumes from the state of two.
"""

import csv
import json
import os
import signal
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

from pytorch_accelerated import Trainer
from pytorch_accelerated.callbacks import (
    CSVLoggerCallback,
    JSONLoggerCallback,
    SaveTrainingStateCallback,
    TrainerCallback,
)
from tests.support.reference import regression_data, tiny_trainer
from tests.training.test_step_records import Batches, assert_are_the_means, facts

RANKS = int(os.environ.get("WORLD_SIZE", "1"))
folder, stage = Path(sys.argv[1]), sys.argv[2]
SIZE = 4 * 50 - 3  # the last update of an epoch has one row: none for one of two ranks
INTERVAL = 4


class Die(TrainerCallback):
    ranks_agree_after_each_update = False

    def on_optimizer_step_end(self, trainer: Trainer, **kwargs: Any) -> None:
        if trainer.run_history.updates_done == 90:
            os.kill(os.getpid(), signal.SIGKILL)


def train(place: Path, *callbacks: Any, **arguments: Any) -> Any:
    loggers = [CSVLoggerCallback(place / "log.csv"), JSONLoggerCallback(place / "log.jsonl")]
    saver = SaveTrainingStateCallback(place / "states", save_every_n_steps=7)
    trainer = tiny_trainer(*callbacks, *loggers, saver, seed=3)
    assert trainer._ranks.count == RANKS
    data = regression_data(SIZE)
    return trainer.train(
        data, 3, data, per_device_batch_size=4 // RANKS, record_every_n_steps=INTERVAL, **arguments
    ), trainer


def files(place: Path) -> list[Any]:
    with open(place / "log.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    lines = [json.loads(line) for line in (place / "log.jsonl").read_text().splitlines()]
    seconds = [row["seconds"] for row in lines if "seconds" in row]
    assert seconds == sorted(seconds)
    times = {"seconds", "samples_per_second", "data_wait_share", "peak_memory"}
    return [
        [{name: value for name, value in row.items() if name not in times} for row in part] for part in (rows, lines)
    ]


if stage == "killed":
    train(folder, Die())

if stage == "resumed":
    batches = Batches()
    whole, trainer = train(folder / "whole", batches)
    ends = [*range(4, 50, 4), 50]
    assert [record.update for record in whole.step_records] == [50 * epoch + end for epoch in range(3) for end in ends]
    is_first = trainer.run_context.parts.ranks.is_first
    if is_first:
        assert_are_the_means(whole.step_records, batches)
    everyones = trainer.run_context.parts.ranks.exchange(list(whole.step_records))
    assert all(records == everyones[0] for records in everyones)

    resumed, trainer = train(folder, resume_from=folder / "states")
    assert facts(resumed.step_records) == facts(whole.step_records)
    assert {len(record.ranks) for record in resumed.step_records} == {RANKS if RANKS > 1 else 0}
    seconds = [record.seconds for record in resumed.step_records]
    assert seconds == sorted(seconds)
    if is_first:
        assert files(folder) == files(folder / "whole")

if stage == "fewer":
    assert RANKS == 1
    with warnings.catch_warnings(record=True) as caught:
        resumed, _ = train(folder / "fewer", resume_from=folder / "states" / "step_84")
    assert not [warning for warning in caught if "the run history" in str(warning.message)]
    whole, _ = train(folder / "whole")
    assert [record.update for record in resumed.step_records] == [record.update for record in whole.step_records]
    for own, other in zip(resumed.step_records, whole.step_records, strict=True):
        assert own.samples == other.samples
        assert own.train_loss == pytest.approx(other.train_loss, rel=1e-9)
