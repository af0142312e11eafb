"""What TensorBoard gets, read back from its files."""

import json
import sqlite3
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from pytorch_accelerated.extras.huggingface.trackers import tag_of
from pytorch_accelerated.huggingface import TrainerCallback
from pytorch_accelerated.huggingface.trainer_callback import TensorBoardCallback
from tests.chaos.size import in_release
from tests.huggingface.runs import StopAt, make_trainer
from tests.support.processes import run_forked


def scalars_in(folder: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder)).Reload()
    # Files of one second come in the order of their names, where 10 is before 9; so each value's own time is asked.
    written = {tag: sorted(events.Scalars(tag), key=lambda event: event.wall_time) for tag in events.Tags()["scalars"]}
    return {tag: [(event.step, event.value) for event in values] for tag, values in written.items()}


def texts_in(folder: Path) -> set[str]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return set(EventAccumulator(str(folder)).Reload().Tags()["tensors"])


def test_an_evaluation_after_the_training_continues_the_curves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(100))
    monkeypatch.setattr(time, "strftime", lambda pattern: f"time {next(clock)}")
    trainer = make_trainer(tmp_path, report_to="tensorboard", num_train_epochs=1)
    trainer.evaluate()
    for _ in range(2):
        trainer.train()
        trainer.evaluate()
    (folder,) = (tmp_path / "runs").iterdir()
    curves = scalars_in(folder)
    assert [step for step, _ in curves["train/loss"]] == [1, 2, 3, 4, 5] * 2
    assert [step for step, _ in curves["eval/loss"]] == [0, 5, 5]


def test_a_writer_of_the_users_is_used_and_stays_open(tmp_path: Path) -> None:
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(tmp_path))
    make_trainer(tmp_path, TensorBoardCallback(writer), max_steps=2).train()
    writer.add_scalar("mine", 1.0, 9)
    writer.close()
    scalars = scalars_in(tmp_path)
    assert [step for step, _ in scalars["train/loss"]] == [1, 2]
    assert scalars["mine"] == [(9, 1.0)]


def test_a_resumed_run_goes_on_in_the_folder_of_its_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(100))
    monkeypatch.setattr(time, "strftime", lambda pattern: f"time {next(clock)}")
    make_trainer(tmp_path, StopAt(3), report_to="tensorboard", num_train_epochs=1).train()
    time.sleep(1 - time.time() % 1)  # see `scalars_in`
    make_trainer(tmp_path, report_to="tensorboard", num_train_epochs=1).train(resume_from_checkpoint=True)
    (folder,) = (tmp_path / "runs").iterdir()
    assert [step for step, _ in scalars_in(folder)["train/loss"]] == [1, 2, 3, 4, 5]
    make_trainer(tmp_path, report_to="tensorboard", num_train_epochs=1).train()
    assert len(list((tmp_path / "runs").iterdir())) == 2


@pytest.mark.filterwarnings("ignore:A second TensorBoardCallback was added")  # which is what is wanted here
def test_a_run_with_two_writers_is_resumed(tmp_path: Path) -> None:
    make_trainer(tmp_path, StopAt(3), TensorBoardCallback(), report_to="tensorboard").train()
    resumed = make_trainer(tmp_path, TensorBoardCallback(), report_to="tensorboard")
    assert resumed.train(resume_from_checkpoint=True).global_step == 10


class Fails(TrainerCallback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            raise ValueError("a step of the user's")


@pytest.mark.parametrize("ending", ["trained and evaluated", "evaluated", "failed"])
def test_no_thread_is_left_and_everything_is_on_the_disk(ending: str, tmp_path: Path) -> None:
    before = set(threading.enumerate())
    callbacks = [Fails(1)] if ending == "failed" else []
    trainer = make_trainer(tmp_path, *callbacks, logging_dir=str(tmp_path / "logs"), max_steps=1)
    if ending == "failed":
        with pytest.raises(ValueError, match="a step of the user's"):
            trainer.train()
    elif ending == "trained and evaluated":
        trainer.train()
    if ending != "failed":
        trainer.evaluate()
        assert len(scalars_in(tmp_path / "logs")["eval/loss"]) == 1
    assert set(threading.enumerate()) <= before
    assert list((tmp_path / "logs").iterdir())


RESUMED = """
import contextlib
import json
from tests.huggingface.runs import make_trainer
from tests.huggingface.test_reporting import Fails

strategies = {"save_strategy": "steps", "save_steps": 3, "eval_strategy": "epoch"}
settings = {"max_steps": 8, "report_to": "mlflow", "run_name": "run", **strategies}
with contextlib.suppress(ValueError):
    make_trainer(".", Fails(5), **settings).train()
trainer = make_trainer(".", **settings)
trainer.train(resume_from_checkpoint=True)
trainer.evaluate()
print(json.dumps(trainer.state.log_history))
"""


@in_release  # tests/callbacks/test_trackers.py has the same for each tracker
@pytest.mark.processes
def test_a_failed_and_resumed_run_is_one_run_in_mlflow(tmp_path: Path) -> None:
    pytest.importorskip("mlflow")
    database = tmp_path / "mlflow.db"
    output = run_forked(RESUMED, env={"MLFLOW_TRACKING_URI": f"sqlite:///{database}"}, cwd=tmp_path)

    with sqlite3.connect(database) as connection:
        ((run_id, status, name),) = connection.execute("SELECT run_uuid, status, name FROM runs").fetchall()
        logged = connection.execute("SELECT key, step, value FROM metrics").fetchall()
        params = dict(connection.execute("SELECT key, value FROM params").fetchall())
    connection.close()
    assert (status, name, params["max_steps"]) == ("FINISHED", "run", "8")
    assert f"Logged to mlflow: run {run_id} in sqlite:///{database}" in output.stdout
    log_history = json.loads(output.stdout.splitlines()[-1])
    expected = [
        (tag_of(key), entry["step"], value) for entry in log_history for key, value in entry.items() if key != "step"
    ]
    assert {(key, step) for key, step, _ in logged} == {(key, step) for key, step, _ in expected}
    doubles = Counter((key, step) for key, step, _ in logged) - Counter((key, step) for key, step, _ in expected)
    assert not doubles
    losses = {step: value for key, step, value in expected if key == "train/loss"}
    assert {step: value for key, step, value in logged if key == "train/loss"} == losses
    assert sorted(losses) == list(range(1, 9))
