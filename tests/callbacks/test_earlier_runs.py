"""Files and folders of an earlier run are not replaced in silence, and a second run counts on where the first ended."""

import csv
import functools
import re
from pathlib import Path

import pytest

from pytorch_accelerated.callbacks.loggers import CSVLoggerCallback
from pytorch_accelerated.callbacks.saving import SaveBestModelCallback, SaveTrainingStateCallback, WSDCheckpointCallback
from pytorch_accelerated.callbacks.weights import ModelEmaCallback
from pytorch_accelerated.schedulers import WSDLrScheduler
from tests.callbacks.runs import Score, a_trainer, fit

# An interrupted run ends before its first evaluation, so it has no best model to load.
pytestmark = pytest.mark.filterwarnings("ignore:The model has the weights of the last update")
SCHEDULE = functools.partial(WSDLrScheduler, total_steps=15)
SAVERS = {
    "best model": (lambda: SaveBestModelCallback("best_model.pt"), r"best_model.pt is from an earlier run \(20..-"),
    "average": (ModelEmaCallback, r"ema_model.pt is from an earlier run .* the best model of this run will replace it"),
    "average at the end": (
        lambda: ModelEmaCallback(evaluate_during_training=False),
        r"ema_model.pt is from an earlier run .* the average of this run will replace it",
    ),
    "states": (
        lambda: SaveTrainingStateCallback("states", save_every_n_epochs=2),
        r"states/final is from an earlier run \(20..-.* will replace those of the same names; pass "
        r"`resume_from='states'`",
    ),
    "few states": (
        lambda: SaveTrainingStateCallback("states", max_checkpoints=1),
        r"states/final is from an earlier run \(.* will replace or delete earlier states",
    ),
    "checkpoints of a schedule": (
        WSDCheckpointCallback,
        r"post_decay.pt is from an earlier run \(.* will replace those at the same steps",
    ),
}


def lines_about_earlier_runs(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return [line for line in capsys.readouterr().out.splitlines() if "earlier run" in line]


@pytest.mark.parametrize("kind", SAVERS)
def test_one_line_says_what_is_there_and_what_will_become_of_it(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    make, message = SAVERS[kind]
    fit(a_trainer(make()), create_scheduler_fn=SCHEDULE)
    assert lines_about_earlier_runs(capsys) == []
    fit(a_trainer(make()), create_scheduler_fn=SCHEDULE)
    (line,) = lines_about_earlier_runs(capsys)
    assert re.search(message, line), line
    fit(a_trainer(make()), create_scheduler_fn=SCHEDULE)  # a cell of a notebook that is run again
    assert lines_about_earlier_runs(capsys) == []


def test_a_second_run_that_continues_the_search_replaces_a_file_only_for_a_better_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    best = SaveBestModelCallback(reset_on_train=False)
    trainer = a_trainer(best)
    fit(trainer)
    fit(trainer, reset_run_history=False)
    assert lines_about_earlier_runs(capsys) == []


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
