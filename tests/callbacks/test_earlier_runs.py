"""States of an earlier run are not replaced in silence, and a second run counts on where the first ended."""

import csv
import re
from pathlib import Path

import pytest

from pytorch_accelerated.callbacks.loggers import CSVLoggerCallback
from pytorch_accelerated.callbacks.saving import SaveTrainingStateCallback
from tests.callbacks.runs import Score, a_trainer, fit

SAVERS = {
    "states": (
        lambda: SaveTrainingStateCallback("states", save_every_n_epochs=2),
        r"states has states of an earlier run, the last of them final: this run will replace those of the same names; "
        "pass `resume_from='states'`",
    ),
    "few states": (
        lambda: SaveTrainingStateCallback("states", max_checkpoints=1),
        "states has states of an earlier run, .* will replace or delete earlier states",
    ),
}


@pytest.mark.parametrize("kind", SAVERS)
def test_one_line_says_what_is_there_and_what_will_become_of_it(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    make, message = SAVERS[kind]
    fit(a_trainer(make()))
    assert "earlier run" not in capsys.readouterr().out
    fit(a_trainer(make()))
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "earlier run" in line]
    assert re.search(message, line), line


def test_updates_are_counted_on_where_the_history_is_not_reset() -> None:
    log = CSVLoggerCallback("log.csv", step_records=False)
    trainer = a_trainer(log)
    fit(trainer, 2)
    history = fit(trainer, 2, reset_run_history=False)
    assert [(record.epoch, record.update) for record in history.records if record.name == "train_loss_epoch"] == [
        (1, 5),
        (2, 10),
        (3, 15),
        (4, 20),
    ]
    with Path("log.csv").open() as file:
        rows = [(int(row["epoch"]), int(row["update"])) for row in csv.DictReader(file)]
    assert rows == [(1, 5), (2, 10), (3, 15), (4, 20)]
    assert trainer.run_state.updates == 10
    history = fit(trainer, 1)
    assert [record.update for record in history.records] == [5, 5]


def test_the_best_states_of_a_second_run_are_found(capsys: pytest.CaptureFixture[str]) -> None:
    score = Score([3.0, 1.0, 2.0])
    trainer = a_trainer(score)
    fit(trainer, 1)
    saver = SaveTrainingStateCallback(
        "states", save_every_n_epochs=1, save_at_end=False, max_checkpoints=1, keep_best=1, watch_metric="score"
    )
    trainer.callback_handler.add_callback(saver)
    fit(trainer, 3, reset_run_history=False)
    assert {folder.name for folder in Path("states").iterdir() if folder.is_dir()} == {"epoch_3", "epoch_4"}
