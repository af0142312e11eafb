"""The best model is found, saved and loaded; training states appear, and stay, as long as they should."""

import contextlib
import dataclasses
import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from pytorch_accelerated import Trainer
from pytorch_accelerated.callbacks import saving
from pytorch_accelerated.callbacks.evaluation import StepBasedEvaluationCallback
from pytorch_accelerated.callbacks.saving import SaveBestModelCallback, SaveTrainingStateCallback
from pytorch_accelerated.callbacks.stopping import EarlyStoppingCallback, TerminateOnNaNCallback
from pytorch_accelerated.callbacks.weights import ModelEmaCallback
from pytorch_accelerated.errors import (
    CheckpointError,
    DuplicateCallbackError,
    NonFiniteLossError,
)
from pytorch_accelerated.loop.callback import TrainerCallback
from pytorch_accelerated.states import disk
from pytorch_accelerated.states.layout import dump_manifest
from pytorch_accelerated.states.publish import remove_state
from pytorch_accelerated.states.verify import read_manifest, verify
from pytorch_accelerated.utils import read_run_history
from tests.callbacks.runs import (
    Die,
    DieAfter,
    Score,
    SpoilAfter,
    StopAfter,
    a_trainer,
    assert_same_weights,
    fit,
    weights_of,
)
from tests.checkpointing.faulty_disk import FaultyDisk

NAN = math.nan


def save_best_score(**kwargs: Any) -> SaveBestModelCallback:
    return SaveBestModelCallback(watch_metric="score", **kwargs)


# ------------------------------------------------------------------------------------------------------ the best model


@pytest.mark.parametrize(
    ("scores", "greater_is_better", "best"),
    [
        ([3.0, 1.0, 2.0], False, 1),
        ([3.0, 1.0, 2.0], True, 0),
        ([1.0, 1.0, 1.0], False, 0),
        ([-1.0, -2.0, -3.0], False, 2),
        ([NAN, 2.0, 3.0], False, 1),
        ([NAN, 2.0, 3.0], True, 2),
        ([2.0, NAN, 1.0], False, 2),
        ([math.inf, 5.0, NAN], False, 1),
    ],
)
def test_a_run_ends_with_the_weights_of_the_best_epoch(scores: list[float], greater_is_better: bool, best: int) -> None:
    score, callback = Score(scores), save_best_score(greater_is_better=greater_is_better)
    trainer = a_trainer(score, callback)
    fit(trainer)
    assert_same_weights(weights_of(trainer.model), score.weights[best])
    assert (callback.best_metric, callback.best_metric_epoch) == (scores[best], best + 1)
    saved = torch.load("best_model.pt", weights_only=True)
    assert_same_weights(saved["model_state_dict"], score.weights[best])
    assert (saved["score"], saved["epoch"]) == (scores[best], best + 1)


@pytest.mark.parametrize("save_optimizer", [True, False])
@pytest.mark.parametrize("save_scheduler", [True, False])
def test_every_save_has_the_entries_that_were_asked_for(save_optimizer: bool, save_scheduler: bool) -> None:
    class Look(TrainerCallback):
        def on_training_run_epoch_end(self, trainer: Trainer, **kwargs: Any) -> None:
            found.append(set(torch.load("best_model.pt", weights_only=True)))

    found: list[set[str]] = []
    callback = save_best_score(save_optimizer=save_optimizer, save_scheduler=save_scheduler)
    fit(a_trainer(Score([3, 2, 1]), callback, Look()), create_scheduler_fn=_decay)
    expected = {"model_state_dict", "score", "epoch"}
    expected |= {"optimizer_state_dict"} if save_optimizer else set()
    expected |= {"scheduler_state_dict"} if save_scheduler else set()
    assert found == [expected] * 3


def _decay(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)


def test_optimizer_and_scheduler_of_the_best_epoch_come_with_its_weights() -> None:
    trainer = a_trainer(Score([1, 2, 3]), save_best_score())
    fit(trainer, create_scheduler_fn=_decay)
    assert trainer.scheduler.last_epoch == 5
    steps = {state["step"].item() for state in trainer.optimizer.state.values()}
    assert steps == {5}


def test_the_best_weights_are_loaded_after_a_loss_that_is_not_finite() -> None:
    score = Score([2, 1, 3])
    trainer = a_trainer(score, save_best_score(), TerminateOnNaNCallback, SpoilAfter(12))
    with pytest.raises(NonFiniteLossError, match="epoch 3"):
        fit(trainer)
    assert_same_weights(weights_of(trainer.model), score.weights[1])


def test_no_model_is_saved_whose_parameters_are_not_finite() -> None:
    # Without TerminateOnNaNCallback, and with a metric that does not show it.
    trainer = a_trainer(Score([3, 2, 1]), save_best_score(), SpoilAfter(7))
    with pytest.raises(NonFiniteLossError, match="parameters"):
        fit(trainer)
    saved = torch.load("best_model.pt")
    assert saved["epoch"] == 1
    assert all(torch.isfinite(tensor).all() for tensor in saved["model_state_dict"].values())


def test_a_run_that_saved_nothing_says_so_and_keeps_its_weights() -> None:
    score = Score([NAN, NAN, NAN])
    trainer = a_trainer(score, save_best_score())
    with pytest.warns(UserWarning, match="'score' had no value but NaN") as caught:
        fit(trainer)
    assert [Path(warning.filename).name for warning in caught] == ["runs.py"]  # where `train` is called
    assert_same_weights(weights_of(trainer.model), score.weights[2])
    assert not Path("best_model.pt").exists()


def test_values_of_an_earlier_run_are_not_judged() -> None:
    trainer = a_trainer()
    fit(trainer, num_epochs=1)
    callback = SaveBestModelCallback()
    # An evaluation inside the epoch is the first chance to judge, and has nothing new of the watched metric.
    trainer.callback_handler.add_callbacks([StepBasedEvaluationCallback(2), StopAfter(3), callback])
    with pytest.warns(UserWarning, match="weights of the last update"):
        fit(trainer, num_epochs=1, reset_run_history=False)
    assert callback.best_metric is None


@pytest.mark.parametrize(("reset_on_train", "best"), [(True, 5.0), (False, 1.0)])
def test_a_second_run_starts_its_own_search_by_default(reset_on_train: bool, best: float) -> None:
    score, callback = Score([1]), save_best_score(reset_on_train=reset_on_train)
    trainer = a_trainer(score, callback)
    fit(trainer, num_epochs=1)
    score.values = [5]
    fit(trainer, num_epochs=1)
    assert callback.best_metric == best
    assert_same_weights(weights_of(trainer.model), score.weights[int(reset_on_train)])


def test_two_callbacks_with_one_path_are_refused() -> None:
    with pytest.raises(DuplicateCallbackError):
        a_trainer(SaveBestModelCallback(), SaveBestModelCallback(watch_metric="train_loss_epoch"))
    other_name_of_it = Path("best_model.pt").resolve()
    for other in (SaveBestModelCallback(other_name_of_it), ModelEmaCallback(save_path="best_model.pt")):
        with pytest.raises(DuplicateCallbackError, match="save_path"):
            fit(a_trainer(SaveBestModelCallback(), other))


def test_a_resumed_run_keeps_the_best_value_of_the_run_before_it() -> None:
    scores = [3.0, 1.0, 2.0, 4.0]
    whole = a_trainer(Score(scores), save_best_score(save_path="whole.pt"))
    fit(whole, num_epochs=4)

    states = SaveTrainingStateCallback(save_every_n_epochs=1)
    with pytest.raises(Die):
        fit(a_trainer(Score(scores), save_best_score(), states, DieAfter(12)), num_epochs=4)
    callback = save_best_score()
    resumed = a_trainer(Score(scores), callback)
    fit(resumed, num_epochs=4, resume_from="training_states")
    assert (callback.best_metric, callback.best_metric_epoch) == (1.0, 2)
    assert_same_weights(weights_of(resumed.model), weights_of(whole.model))


def test_a_best_model_whose_file_is_gone_is_forgotten_when_the_run_is_resumed() -> None:
    states = SaveTrainingStateCallback(save_every_n_epochs=1)
    with pytest.raises(Die):
        fit(a_trainer(Score([1, 3, 2]), save_best_score(), states, DieAfter(7)))
    Path("best_model.pt").unlink()
    score, callback = Score([1, 3, 2]), save_best_score()
    trainer = a_trainer(score, callback)
    with (
        pytest.warns(UserWarning, match="not in best_model.pt any more"),
        pytest.warns(UserWarning, match="The best score was 1.000, in epoch 1, but its weights are gone: neither the"),
    ):
        fit(trainer, resume_from="training_states")
    assert (callback.best_metric, callback.best_metric_epoch) == (2, 3)
    assert_same_weights(weights_of(trainer.model), score.weights[-1])


class Beside(TrainerCallback):
    """Enters the value of a state that is gone."""

    def __init__(self, *judges: Any) -> None:
        self.judges = judges

    def on_training_run_epoch_end(self, trainer: Trainer, **kwargs: Any) -> None:
        if trainer.run_history.current_epoch == 2:
            trainer.run_history.update_metric("score", 0.5)
            for judge in self.judges:
                judge.judge_state(trainer, Path("gone"))


@pytest.mark.parametrize("stops", [True, False])
def test_a_best_value_whose_weights_are_gone_is_said_at_the_end(stops: bool) -> None:
    best = SaveBestModelCallback(watch_metric="score")
    stopping = EarlyStoppingCallback(2 if stops else 9, 0.0, watch_metric="score")
    trainer = a_trainer(Beside(best, stopping), Score([3, 4, 2, 1.5, 1]), best, stopping)
    with (
        pytest.warns(UserWarning, match="The best model so far is lost"),
        pytest.warns(UserWarning, match="best score was 0.5000?, in epoch 2, but its weights are gone: neither the mo"),
    ):
        fit(trainer, 5)
    assert (best.best_metric, trainer.run_state.epochs) == ((1.5, 4) if stops else (1.0, 5))


def test_a_lost_best_model_hides_no_failed_save() -> None:
    class FullDisk(TrainerCallback):
        def on_eval_epoch_end(self, trainer: Trainer, **kwargs: Any) -> None:
            if trainer.run_history.current_epoch == 2:
                disks.enter_context(FaultyDisk(0).installed())  # the next save fails

    best = save_best_score()
    with (
        contextlib.ExitStack() as disks,
        pytest.warns(UserWarning, match="No space left .* the next save tries again"),
        pytest.warns(UserWarning, match="The best model so far is lost"),
        pytest.warns(UserWarning, match="but its weights are gone"),
        pytest.raises(CheckpointError, match="its last save has failed"),
    ):
        fit(a_trainer(FullDisk, Score([3, 2, 4]), best, Beside(best)))


# ----------------------------------------------------------------------------------------------------- training states


def states_in(folder: str = "training_states") -> set[str]:
    """The names of the states in a folder, all of which must be as they were written."""
    names = {path.name for path in Path(folder).iterdir() if path.is_dir()}
    for name in names:
        read_run_history(Path(folder, name))  # reads every byte
    return names


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({}, {"final"}),
        ({"save_at_end": False, "save_every_n_epochs": 2}, {"epoch_2", "epoch_4"}),
        ({"save_every_n_epochs": 3}, {"epoch_3", "final"}),
        ({"save_every_n_steps": 8}, {"step_8", "step_16", "step_24", "final"}),
        ({"save_every_n_epochs": 2, "save_every_n_steps": 10}, {"epoch_2", "epoch_4", "step_10", "step_20", "final"}),
    ],
)
def test_states_are_saved_when_asked_for(arguments: dict[str, Any], expected: set[str]) -> None:
    fit(a_trainer(SaveTrainingStateCallback(**arguments)), num_epochs=5)
    assert states_in() == expected


@pytest.mark.parametrize("updates", [3, 5, 9])
def test_nothing_is_saved_after_a_loss_that_is_not_finite(updates: int) -> None:
    callback = SaveTrainingStateCallback(save_every_n_steps=4)
    trainer = a_trainer(callback, TerminateOnNaNCallback, SpoilAfter(updates))
    with pytest.raises(NonFiniteLossError, match="batch"):
        fit(trainer)
    saved = {f"step_{step}" for step in (4, 8) if step <= updates}
    assert {path.name for path in Path().glob("training_states/*")} == saved


def test_the_newest_states_are_kept_also_over_a_restart() -> None:
    def callback() -> SaveTrainingStateCallback:
        return SaveTrainingStateCallback(save_every_n_steps=2, save_at_end=False, max_checkpoints=2)

    with pytest.raises(Die):
        fit(a_trainer(callback(), DieAfter(7)))
    assert states_in() == {"step_4", "step_6"}
    fit(a_trainer(callback(), StopAfter(9)), resume_from="training_states")
    assert states_in() == {"step_6", "step_8"}


def test_an_older_state_is_there_until_the_new_one_is_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[set[str]] = []

    def look_and_remove(state: Path) -> None:
        found.append(states_in())
        for name in states_in():
            verify(Path("training_states") / name)
        remove_state(state)

    monkeypatch.setattr(saving, "remove_state", look_and_remove)
    fit(a_trainer(SaveTrainingStateCallback(save_every_n_steps=1, max_checkpoints=1)), num_epochs=1)
    steps = [{f"step_{number}", f"step_{number + 1}"} for number in range(1, 5)]
    assert found == [*steps, {"step_5", "final"}]
    assert states_in() == {"final"}


@pytest.mark.parametrize(
    ("scores", "arguments", "expected"),
    [
        ([2, 1, 4, 3], {"keep_best": 1}, {"epoch_2", "epoch_4"}),
        ([2, 1, 4, 3], {"keep_best": 2}, {"epoch_1", "epoch_2", "epoch_4"}),
        ([2, 1, 4, 3], {"keep_best": 1, "greater_is_better": True}, {"epoch_3", "epoch_4"}),
        ([1, 2, 3, 4], {"keep_best": 1, "max_checkpoints": 2}, {"epoch_1", "epoch_3", "epoch_4"}),
        ([NAN, 2, 1, NAN], {"keep_best": 2}, {"epoch_2", "epoch_3", "epoch_4"}),
        # The last epoch is the best one, and is there twice: it takes one of the two places.
        ([4, 3, 2, 1], {"keep_best": 2, "save_at_end": True}, {"epoch_3", "epoch_4", "final"}),
    ],
)
def test_the_best_states_are_kept(scores: list[float], arguments: dict[str, Any], expected: set[str]) -> None:
    arguments = {"save_every_n_epochs": 1, "save_at_end": False, "watch_metric": "score", **arguments}
    fit(a_trainer(Score(scores), SaveTrainingStateCallback(**arguments)), num_epochs=4)
    assert states_in() == expected


def without_metrics(state: Path) -> None:
    """As version 1.0 wrote it."""
    manifest = read_manifest(state)
    facts = {name: fact for name, fact in manifest.facts.items() if name != "metrics"}
    (state / "manifest.json").write_bytes(dump_manifest(dataclasses.replace(manifest, facts=facts)))


@pytest.mark.parametrize("change", [lambda state: (state / "run.safetensors").unlink(), without_metrics])
def test_states_are_judged_by_their_manifests_and_those_of_before_by_their_histories(change: Any) -> None:
    class Change(TrainerCallback):
        def on_train_epoch_start(self, trainer: Trainer, **kwargs: Any) -> None:
            for state in set(Path("training_states").glob("epoch_*")) - changed:
                change(state)
                changed.add(state)

    changed: set[Path] = set()
    saver = SaveTrainingStateCallback(save_every_n_epochs=1, save_at_end=False, watch_metric="score", keep_best=2)
    fit(a_trainer(Score([2, 1, 4, 3, 5]), saver, Change()), num_epochs=5)
    assert {state.name for state in Path("training_states").glob("epoch_*")} == {"epoch_1", "epoch_2", "epoch_5"}


def test_folders_with_other_names_are_left_alone() -> None:
    class SaveOne(TrainerCallback):
        def on_train_epoch_start(self, trainer: Trainer, **kwargs: Any) -> None:
            trainer.save_training_state("training_states/my_own")

    Path("training_states/epoch_1_notes").mkdir(parents=True)
    callback = SaveTrainingStateCallback(save_every_n_epochs=1, max_checkpoints=1, save_at_end=False)
    fit(a_trainer(SaveOne(), callback))
    assert {path.name for path in Path("training_states").iterdir()} == {"epoch_1_notes", "my_own", "epoch_3"}


def test_a_state_that_cannot_be_deleted_brings_a_warning_and_the_run_continues(monkeypatch: pytest.MonkeyPatch) -> None:
    really_move = disk.move

    def move(source: Path, target: Path) -> None:
        if source.name == "epoch_1":
            raise PermissionError(13, "Permission denied")
        really_move(source, target)

    monkeypatch.setattr(disk, "move", move)
    callback = SaveTrainingStateCallback(save_every_n_epochs=1, max_checkpoints=1, save_at_end=False)
    trainer = a_trainer(callback)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(trainer)
    assert trainer.run_state.epochs == 3
    assert states_in() == {"epoch_1", "epoch_3"}
    assert all("cannot be deleted" in str(warning.message) for warning in caught)
    assert len(caught) == 2


class Clock(TrainerCallback):
    """A clock on which each update takes 20 seconds."""

    seconds = 0.0

    def __call__(self) -> float:
        return self.seconds

    def on_train_step_start(self, trainer: Trainer, **kwargs: Any) -> None:
        self.seconds += 20


def test_states_are_saved_by_the_clock() -> None:
    class Timed(SaveTrainingStateCallback):
        _clock = clock = Clock()

    fit(a_trainer(Timed.clock, Timed(save_every_n_minutes=1, save_at_end=False)))
    # The clock starts with the first update, at its end.
    assert states_in() == {"step_4", "step_7", "step_10", "step_13"}
