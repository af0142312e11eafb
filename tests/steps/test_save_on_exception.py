"""A run that an error ends is saved as it was after its last complete update, and resumes as if it had not failed."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pytorch_accelerated import Trainer
from pytorch_accelerated.callbacks import (
    MetricsCallback,
    SaveTrainingStateCallback,
    StepBasedEvaluationCallback,
    TrainerCallback,
)
from tests.support import streaming
from tests.support.resuming import assert_same, everything, run


class UsersError(Exception):
    """An error in a user's code."""


def fail(*args: Any, **kwargs: Any) -> Any:
    """Draw from every generator and fail, like code that gets half through its work."""
    torch.rand(2), np.random.rand(), random.random()
    raise UsersError("broken")


class Breaks(TrainerCallback):
    """Lets something fail in the second batch of the update after `updates` updates, or in what follows it."""

    def __init__(self, place: str, updates: int = 5, error: type[BaseException] = UsersError) -> None:
        self.place = place
        self.updates = updates
        self.error = error
        self.batches = 0

    def reaches(self, trainer: Trainer, place: str) -> bool:
        return place == self.place and trainer.run_state.updates >= self.updates

    def on_train_step_start(self, trainer: Trainer, **kwargs: Any) -> None:
        self.batches += 1
        is_second = trainer.run_state.batches_in_epoch % 2 == 1
        if self.reaches(trainer, "forward") and is_second:
            trainer.model[-1].register_forward_pre_hook(fail)  # after batch norm and dropout
        if self.reaches(trainer, "loss") and is_second:
            trainer.loss_func = fail
        if self.reaches(trainer, "data"):
            trainer.train_dataset.inputs = None

    def on_train_step_end(self, trainer: Trainer, *, batch_output: dict[str, Any], **kwargs: Any) -> None:
        trainer.run_history.update_metric("seen", self.batches)
        if self.reaches(trainer, "backward") and trainer.run_state.batches_in_epoch % 2 == 1:
            trainer.model[0].weight.register_hook(fail)
        if self.reaches(trainer, "callback"):
            raise self.error("broken")

    def on_optimizer_step_start(self, trainer: Trainer, **kwargs: Any) -> None:
        if self.reaches(trainer, "before the step"):
            fail()
        if self.reaches(trainer, "optimizer"):
            real = trainer.optimizer.optimizer if hasattr(trainer.optimizer, "optimizer") else trainer.optimizer
            with torch.no_grad():
                real.param_groups[0]["params"][0].add_(1.0)
            fail()
        if self.reaches(trainer, "in the step"):
            trainer.scheduler.step = fail

    def on_train_epoch_end(self, trainer: Trainer, **kwargs: Any) -> None:
        if self.reaches(trainer, "end of training"):
            fail()

    def on_eval_step_end(self, trainer: Trainer, **kwargs: Any) -> None:
        if self.reaches(trainer, "evaluation"):
            fail()

    def on_eval_epoch_end(self, trainer: Trainer, **kwargs: Any) -> None:
        trainer.run_history.update_metric("evaluations", 1)
        if self.reaches(trainer, "end of evaluation"):
            fail()

    def on_training_run_epoch_end(self, trainer: Trainer, **kwargs: Any) -> None:
        if self.reaches(trainer, "end of epoch"):
            fail()

    def state_dict(self) -> dict[str, Any]:
        return {"batches": self.batches}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.batches = state["batches"]


def saver(folder: Path) -> SaveTrainingStateCallback:
    return SaveTrainingStateCallback(folder / "states", save_at_end=False, save_on_exception=True)


def callbacks(place: str) -> list[TrainerCallback]:
    error = MetricsCallback({"error": lambda outputs, targets: float((outputs - targets).abs().mean())})
    return [Breaks(place), error, *([StepBasedEvaluationCallback(3)] if place == "evaluation" else [])]


@pytest.mark.parametrize(
    "place",
    [
        "forward",
        "loss",
        "backward",
        "data",
        "callback",
        "before the step",
        "end of training",
        "evaluation",
        "end of evaluation",
        "end of epoch",
    ],
)
def test_a_run_that_failed_resumes_bit_equal(place: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "whole").mkdir()
    nowhere = callbacks(place)
    nowhere[0].place = ""  # type: ignore[attr-defined]
    whole = run(tmp_path / "whole", *nowhere)
    broken = callbacks(place)
    with pytest.raises(TypeError if place == "data" else UsersError):
        run(tmp_path, *broken, saver(tmp_path))
    state = tmp_path / "states" / "final"
    assert f"Resume it from {state}" in capsys.readouterr().out
    again = callbacks(place)
    again[0].place = ""  # type: ignore[attr-defined]
    resumed = run(tmp_path, *again, saver(tmp_path), process_seed=3, resume_from=tmp_path / "states")
    assert_same(_without_paths(everything(*resumed)), _without_paths(everything(*whole)))


def _without_paths(state: dict[str, Any]) -> dict[str, Any]:
    positions = state["history"]["read_positions"]  # readers are named by the paths that they save to
    state["history"]["read_positions"] = sorted(positions.values())
    return state


@pytest.mark.parametrize("place", ["optimizer", "in the step"])
def test_half_an_update_is_not_saved(place: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UsersError):
        run(tmp_path, *callbacks(place), saver(tmp_path))
    assert not (tmp_path / "states" / "final").exists()
    assert "it came while an update was being applied" in capsys.readouterr().out


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, MemoryError])
def test_what_is_no_ordinary_error_is_saved_before_too(error: type[BaseException], tmp_path: Path) -> None:
    with pytest.raises(error):
        run(tmp_path, Breaks("callback", error=error), saver(tmp_path))
    assert (tmp_path / "states" / "final").is_dir()


def test_an_error_of_the_save_does_not_hide_the_first_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class Unreadable(TrainerCallback):
        def state_dict(self) -> dict[str, Any]:
            return {"function": fail} if any(tmp_path.glob("states/*")) else {}

    class SpoilsFolder(Breaks):
        def on_train_step_end(self, trainer: Trainer, **kwargs: Any) -> None:
            if trainer.run_state.updates >= self.updates:
                (tmp_path / "states" / "final").write_text("in the way")
                raise UsersError("broken")

    with pytest.raises(UsersError):
        run(tmp_path, Unreadable(), SpoilsFolder(""), saver(tmp_path))
    assert "No training state could be saved after this UsersError: " in capsys.readouterr().out


def test_a_model_that_is_not_finite_is_not_saved(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class Spoils(Breaks):
        def on_optimizer_step_end(self, trainer: Trainer, **kwargs: Any) -> None:
            if trainer.run_state.updates == self.updates:
                with torch.no_grad():
                    trainer.model[0].weight[0, 0] = float("nan")

    with pytest.raises(UsersError):
        run(tmp_path, Spoils("callback"), saver(tmp_path))
    assert not (tmp_path / "states" / "final").exists()
    assert "NonFiniteLossError" in capsys.readouterr().out


def test_a_stream_that_knows_its_position_resumes_where_the_last_update_ended(tmp_path: Path) -> None:
    arguments = {"gradient_accumulation_steps": 2}
    whole = streaming.run(streaming.Walk(), **arguments)
    with pytest.raises(UsersError):
        streaming.run(streaming.Walk(), Breaks("callback", updates=4), saver(tmp_path), **arguments)
    resumed = streaming.run(streaming.Walk(), process_seed=3, resume_from=tmp_path / "states", **arguments)
    assert_same(resumed.model.state_dict(), whole.model.state_dict())
