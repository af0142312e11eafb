"""Another process evaluates the training states of a run, and the run uses the values as if they were its own."""

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pytorch_accelerated import Trainer
from pytorch_accelerated.callbacks import (
    EarlyStoppingCallback,
    EvaluateBesideCallback,
    MetricsCallback,
    SaveBestModelCallback,
    SaveTrainingStateCallback,
    TrainerCallback,
)
from pytorch_accelerated.errors import ConfigurationError
from pytorch_accelerated.tracking import RunHistory
from tests.callbacks.runs import DATA, Die, DieAfter, a_trainer, assert_same_weights, fit, weights_of
from tests.support.processes import run_forked

LIMIT = 300.0  # seconds; starting a process takes long on a busy machine
EVALUATE = """
import sys
from pathlib import Path
from torch import nn
from pytorch_accelerated import Trainer
from tests.callbacks.runs import BATCH_SIZE, DATA, noisy_model
from tests.callbacks.test_beside import Slow, error
from tests.support.forks import Fork

follow = sys.argv[2] == "follow"

def evaluate(*callbacks):
    trainer = Trainer(noisy_model(seed=9), nn.MSELoss(), None, callbacks=callbacks, metrics={"error": error})
    trainer.evaluate_states(sys.argv[1], dataset=DATA, per_device_batch_size=BATCH_SIZE, follow=follow)

if sys.argv[2] == "two":
    follow, logs = True, [Path(sys.argv[1]) / f"log_{number}" for number in range(2)]
    for fork in [Fork(lambda: evaluate(Slow()), log) for log in logs]:
        assert fork.wait().status == 0
else:
    evaluate()
"""


class Slow(TrainerCallback):
    """Gives the other process time, and says what it evaluates."""

    def on_optimizer_step_end(self, trainer: Trainer, **kwargs: Any) -> None:
        time.sleep(0.05)

    def on_evaluation_run_start(self, trainer: Trainer, **kwargs: Any) -> None:
        print(trainer.run_state.updates)
        time.sleep(0.3)


def error(targets: Any, predictions: Any) -> float:
    return float(abs(targets - predictions).max())


def beside(folder: Path, train: Callable[[], RunHistory], how: str = "follow") -> RunHistory:
    """The history of `train`, while another process, or two, evaluate the states in `folder`."""
    run_forked("pass\n")  # what starts processes is itself started by the main thread only
    other = threading.Thread(target=run_forked, args=(EVALUATE, folder, how))
    other.start()
    try:
        return train()
    finally:
        other.join()


def evaluated(history: RunHistory) -> list[Any]:
    return sorted(record for record in history.records if record.name.startswith("eval_"))


def in_place() -> list[Any]:
    trainer = a_trainer(MetricsCallback({"error": error}))
    fit(trainer)
    return evaluated(trainer.run_history)


@pytest.mark.processes
def test_values_and_their_places_are_those_of_evaluations_in_the_run(tmp_path: Path):
    saver = SaveTrainingStateCallback(tmp_path, save_every_n_epochs=1, background=True)
    trainer = a_trainer(EvaluateBesideCallback(tmp_path, LIMIT), saver)
    history = beside(tmp_path, lambda: fit(trainer, eval_dataset=None))
    assert evaluated(history) == in_place()
    assert len(evaluated(history)) == 6


@pytest.mark.processes
def test_two_that_evaluate_share_the_states_and_values_are_entered_in_order(tmp_path: Path):
    saver = SaveTrainingStateCallback(tmp_path, save_every_n_epochs=1, save_every_n_steps=2)
    trainer = a_trainer(EvaluateBesideCallback(tmp_path, LIMIT), saver, Slow())
    history = beside(tmp_path, lambda: fit(trainer, eval_dataset=None), "two")
    logs = [(tmp_path / f"log_{number}").read_text().split() for number in range(2)]
    assert all(logs)
    assert sum(map(len, logs)) == len(list(tmp_path.glob("*/manifest.json")))
    updates = [record.update for record in history.records if record.name == "eval_loss_epoch"]
    assert updates == sorted({*range(2, 16, 2), 5, 10, 15})
    assert not list((tmp_path / "evaluations").glob("*.lock"))


@pytest.mark.processes
def test_a_run_that_dies_enters_each_value_once_and_none_of_an_earlier_run(tmp_path: Path):
    earlier = SaveTrainingStateCallback(tmp_path, save_every_n_steps=2)
    fit(a_trainer(earlier, lr=0.5))
    run_forked(EVALUATE, tmp_path, "once")

    def train(*callbacks: Any, **kwargs: Any) -> RunHistory:
        saver = SaveTrainingStateCallback(tmp_path, save_every_n_epochs=1, save_every_n_steps=7)
        return fit(a_trainer(EvaluateBesideCallback(tmp_path, LIMIT), saver, *callbacks), eval_dataset=None, **kwargs)

    def die_and_resume() -> RunHistory:
        with pytest.raises(Die):
            train(DieAfter(12))
        return train(resume_from=tmp_path)

    history = beside(tmp_path, die_and_resume)
    epochs = [record for record in evaluated(history) if record.update not in (7, 14)]
    assert epochs == in_place()
    assert len(evaluated(history)) == 10


@pytest.mark.processes
def test_values_stop_the_run_and_choose_the_model_of_their_state(tmp_path: Path):
    states = tmp_path / "states"
    stopping, best = EarlyStoppingCallback(3, 0.0), SaveBestModelCallback(tmp_path / "best.pt")
    saver = SaveTrainingStateCallback(states, save_every_n_steps=20)
    trainer = a_trainer(EvaluateBesideCallback(states, LIMIT), stopping, best, saver, Slow(), lr=0.1)
    history = beside(states, lambda: fit(trainer, 10**6, eval_dataset=None))
    losses = [record for record in history.records if record.name == "eval_loss_epoch"]
    least = min(losses, key=lambda record: record.value)
    assert history.updates_done < 10**6
    assert (best.best_metric, best.best_metric_epoch) == (least.value, least.epoch)
    of_state = a_trainer()
    of_state.load_training_state(states / f"step_{least.update}")
    assert_same_weights(weights_of(trainer.get_model()), weights_of(of_state.get_model()))
    assert_same_weights(trainer.optimizer.state_dict(), of_state.optimizer.state_dict())


def test_what_would_be_wrong_is_refused_when_the_run_starts(tmp_path: Path):
    beside_it = EvaluateBesideCallback(tmp_path, LIMIT)
    for callbacks, data in (((beside_it,), DATA), ((EarlyStoppingCallback(), beside_it), None)):
        with pytest.raises(ConfigurationError, match="EvaluateBesideCallback"):
            fit(a_trainer(*callbacks), eval_dataset=data)
    trainer = a_trainer(EvaluateBesideCallback(tmp_path, max_wait_seconds=0), SaveTrainingStateCallback(tmp_path))
    with pytest.warns(UserWarning, match="Nothing has evaluated"):
        fit(trainer, eval_dataset=None)
