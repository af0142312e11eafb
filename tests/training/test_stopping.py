"""Runs that end early leave everything in order, and what callbacks ask for happens between two updates."""

import contextlib
import functools
import time
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from pytorch_accelerated import Trainer
from pytorch_accelerated.callbacks import SaveTrainingStateCallback, TerminateOnNaNCallback, TrainerCallback
from pytorch_accelerated.errors import NonFiniteLossError, StopTrainingError
from tests.support.histories import state_without_times
from tests.support.recording import EVENTS
from tests.support.reference import assert_same_parameters, regression_data, tiny_trainer

DATA = regression_data(12)
make = functools.partial(tiny_trainer, seed=3)
# An epoch has 3 updates of 2 batches.
ARGUMENTS: dict[str, Any] = {"eval_dataset": DATA, "per_device_batch_size": 2, "gradient_accumulation_steps": 2}
NOT_IN_TRAINING = ("on_init_end", "on_exception", "on_stop_training_error", "on_non_finite_loss", "on_loss_spike")
EVENTS_OF_TRAINING = [
    event
    for event in EVENTS
    if event not in NOT_IN_TRAINING and "prediction" not in event and "evaluation" not in event
]
HOOKS_OF_TRAINING = [
    *("training_run_start", "train_epoch_start", "backward_step", "optimizer_step", "scheduler_step"),
    *("optimizer_zero_grad", "train_epoch_end", "eval_epoch_start", "calculate_eval_batch_loss", "eval_epoch_end"),
    *("training_run_epoch_end", "training_run_end"),
]


class Once(TrainerCallback):
    """Does something the first time that an event is fired after so many updates."""

    def __init__(self, event: str, action: Any, *, updates: int = 0) -> None:
        self.action = action
        self.updates = updates
        self.is_done = False
        self.endings: list[str] = []
        setattr(self, event, self.act)

    def act(self, trainer: Trainer, **kwargs: Any) -> None:
        if trainer.run_state.updates >= self.updates and not self.is_done:
            self.is_done = True
            self.action(trainer)


class Endings(TrainerCallback):
    def __init__(self) -> None:
        self.seen: list[str] = []

    def on_stop_training_error(self, trainer: Trainer, reason: str = "", **kwargs: Any) -> None:
        self.seen.append(reason)

    def on_training_run_end(self, trainer: Trainer, **kwargs: Any) -> None:
        self.seen.append("end")

    def on_exception(self, trainer: Trainer, exception: BaseException, **kwargs: Any) -> None:
        self.seen.append(type(exception).__name__)


def stop(trainer: Trainer) -> None:
    raise StopTrainingError("enough")


def trained_for(updates: int) -> nn.Module:
    """The model after so many updates."""
    trainer = make()
    if updates:
        trainer.train(DATA, 9, max_num_train_steps=updates, **ARGUMENTS)
    model: nn.Module = trainer.model
    return model


def stopping_in(hook: str) -> type[Trainer]:
    def and_stop(self: Trainer, *args: Any, **kwargs: Any) -> None:
        getattr(Trainer, hook)(self, *args, **kwargs)
        raise StopTrainingError("enough")

    return type("Stopping", (Trainer,), {hook: and_stop})


@pytest.mark.parametrize("place", [*EVENTS_OF_TRAINING, *HOOKS_OF_TRAINING])
def test_a_stop_at_any_event_or_in_any_hook_comes_between_two_updates_and_train_returns(place: str):
    is_event = place.startswith("on_")
    callbacks = [Once(place, stop)] if is_event else []
    trainer = make(*callbacks, endings := Endings(), base=Trainer if is_event else stopping_in(place))
    bare_model, bare_optimizer = trainer.model, trainer.optimizer
    history = trainer.train(DATA, 1, **ARGUMENTS)
    assert_same_parameters(trainer.model, trained_for(trainer.run_state.updates), tolerance=0)
    assert all(parameter.grad is None for parameter in trainer.model.parameters())
    assert trainer.model is bare_model
    assert trainer.optimizer is bare_optimizer
    assert history.get_metric_names() == trainer.run_history.get_metric_names()
    assert endings.seen == (["end"] if place.endswith("training_run_end") else ["enough", "end"])


class Failing(Trainer):
    """Fails in the second batch of an update, when the first has left its gradients."""

    failure: BaseException | None = None

    def calculate_train_batch_loss(self, batch: Any) -> dict[str, Any]:
        if self.failure is not None and self.run_state.batches_in_epoch == 1:
            failure, self.failure = self.failure, None
            raise failure
        return super().calculate_train_batch_loss(batch)


@pytest.mark.parametrize("failure", [KeyboardInterrupt(), RuntimeError(), StopTrainingError()])
def test_a_run_after_one_that_died_inside_an_update_begins_afresh(failure: BaseException):
    trainer = make(endings := Endings(), base=Failing)
    vars(trainer)["failure"] = failure
    is_polite = isinstance(failure, StopTrainingError)
    with contextlib.nullcontext() if is_polite else pytest.raises(type(failure)):
        trainer.train(DATA, 2, **ARGUMENTS)
    assert endings.seen == (["", "end"] if is_polite else [type(failure).__name__])
    trainer.train(DATA, 2, **ARGUMENTS)
    assert_same_parameters(trainer.model, trained_for(6), tolerance=0)


def test_a_time_limit_ends_the_run_after_an_update():
    trainer = make(endings := Endings())
    trainer.train(DATA, 1, max_duration=1e-9, **ARGUMENTS)
    assert endings.seen == ["`max_duration` (1e-09) is over.", "end"]
    assert trainer.run_state.updates == 1
    trainer.train(DATA, 1, max_duration="01:00:00", **ARGUMENTS)
    assert trainer.run_state.updates == 3


class Slow(TrainerCallback):
    """Waits for a second before the first batch, as a compiler or a new worker does."""

    is_over = False

    def on_train_step_start(self, trainer: Trainer, **kwargs: Any) -> None:
        if not self.is_over:
            self.is_over = True
            time.sleep(1)


@pytest.mark.parametrize("is_resumed", [False, True])
def test_a_slow_start_takes_nothing_of_the_time_limit(is_resumed: bool, tmp_path: Path):
    state = None
    if is_resumed:
        state = tmp_path / "state"
        make(Once("on_optimizer_step_end", lambda trainer: trainer.save_training_state(state), updates=2)).train(
            DATA, 1, **ARGUMENTS
        )
    trainer = make(Slow(), endings := Endings())
    trainer.train(DATA, 3, max_duration=0.5, resume_from=state, **ARGUMENTS)
    updates = trainer.run_state.updates
    assert updates > (3 if is_resumed else 1)
    assert endings.seen == (["end"] if updates == 9 else ["`max_duration` (0.5) is over.", "end"])
    assert (trainer.run_context.control.stopping.startup_seconds or 0) >= 1


class OwnLoop(Trainer):
    """Passes over the data in a way of its own."""

    def _run_train_epoch(self, train_dl: Any) -> None:
        for batch in train_dl:
            self.optimizer.zero_grad()
            self.calculate_train_batch_loss(batch)["loss"].backward()
            self.optimizer.step()


def test_a_time_limit_also_ends_a_loop_of_the_users_own():
    trainer = make(endings := Endings(), base=OwnLoop)
    trainer.train(DATA, 3, max_duration=1e-9, per_device_batch_size=2)
    assert endings.seen == ["`max_duration` (1e-09) is over.", "end"]
    assert trainer.run_history.current_epoch == 1


# What callbacks ask for


class SpoiltAtTheEnd(Trainer):
    """Its parameters are infinite after the last update, and no loss shows it."""

    def optimizer_step(self) -> None:
        super().optimizer_step()
        if self.run_state.updates == 2:
            next(self.model.parameters()).data.fill_(float("inf"))


@pytest.mark.parametrize("event", ["on_training_run_epoch_end", "on_train_epoch_end"])
def test_a_run_that_cannot_be_saved_at_its_end_is_an_error_after_the_events_of_the_end(event: str, tmp_path: Path):
    save = SaveTrainingStateCallback(tmp_path)
    trainer = make(Once(event, stop), save, endings := Endings(), base=SpoiltAtTheEnd)
    with pytest.raises(NonFiniteLossError, match="0.weight"):
        trainer.train(DATA, 1, **{**ARGUMENTS, "eval_dataset": None})
    assert len(endings.seen) == 2
    assert endings.seen[-1] == "end"
    assert list(tmp_path.iterdir()) == []


def test_an_evaluation_that_was_asked_for_is_not_made_with_a_model_that_is_not_finite():
    class Bad(Trainer):
        def calculate_train_batch_loss(self, batch: Any) -> dict[str, Any]:
            output = super().calculate_train_batch_loss(batch)
            return {**output, "loss": output["loss"] * float("nan")}

    ask = Once("on_optimizer_step_end", Trainer.request_evaluation)
    trainer = make(ask, TerminateOnNaNCallback, endings := Endings(), base=Bad)
    with pytest.raises(NonFiniteLossError, match="'train_loss_epoch'"):
        trainer.train(DATA, 1, **ARGUMENTS)
    assert endings.seen[1:] == ["end"]
    assert list(trainer.run_history.get_metric_names()) == []


@pytest.mark.parametrize(
    ("event", "updates", "is_intermediate"),
    [
        ("on_training_run_start", 0, False),
        ("on_train_epoch_start", 0, False),
        ("on_train_step_start", 1, False),
        ("on_train_step_end", 2, False),
        ("on_optimizer_step_start", 1, False),
        ("on_optimizer_step_end", 2, False),
        ("on_train_epoch_end", 3, False),
        ("on_eval_epoch_start", 3, False),
        ("on_eval_step_end", 3, False),
        ("on_eval_epoch_start", 2, True),
        ("on_eval_step_end", 2, True),
        ("on_eval_epoch_end", 2, True),
        ("on_eval_epoch_end", 3, False),
        ("on_training_run_epoch_end", 3, False),
    ],
)
def test_a_state_that_is_asked_for_at_any_event_resumes_to_the_same_end(
    event: str, updates: int, is_intermediate: bool, tmp_path: Path
):
    def fit(*callbacks: Any, **kwargs: Any) -> Trainer:
        trainer = make(*callbacks)
        trainer.train(DATA, 2, **ARGUMENTS, **kwargs)
        return trainer

    class AskInTime(TrainerCallback):
        """Lets every run evaluate in the second update, where the case is about that."""

        def on_optimizer_step_end(self, trainer: Trainer, **kwargs: Any) -> None:
            if is_intermediate and trainer.run_state.updates == 2:
                trainer.request_evaluation()

    def save(trainer: Trainer) -> None:
        trainer.save_training_state(tmp_path / "state")

    whole = fit(AskInTime())
    interrupted = fit(AskInTime(), Once(event, save, updates=updates))
    resumed = fit(AskInTime(), resume_from=tmp_path / "state")
    assert state_without_times(interrupted.run_history) == state_without_times(whole.run_history)
    assert state_without_times(resumed.run_history) == state_without_times(whole.run_history)
    assert resumed.run_state == whole.run_state
    assert_same_parameters(resumed.model, whole.model, tolerance=0)
