"""A working folder that changes, or goes, during a run moves no file and ends nothing, whatever is given as a path."""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from pytorch_accelerated import Trainer
from pytorch_accelerated.callbacks import (
    CSVLoggerCallback,
    JSONLoggerCallback,
    ModelEmaCallback,
    ProfilerCallback,
    ReportCallback,
    ResultCallback,
    SaveBestModelCallback,
    SaveTrainingStateCallback,
    TrackerCallback,
    TrainerCallback,
    WSDCheckpointCallback,
)
from pytorch_accelerated.huggingface import TrainerCallback as FaceCallback
from pytorch_accelerated.schedulers import WSDLrScheduler
from tests.callbacks.runs import a_trainer, fit
from tests.huggingface.runs import make_trainer


class Leave(TrainerCallback):
    """Goes to another folder in the middle of the first epoch, which is deleted in the second."""

    def __init__(self, other: Path) -> None:
        self.other = other

    def on_training_run_start(self, trainer: Trainer, **kwargs: Any) -> None:
        self.other.mkdir(exist_ok=True)

    def on_optimizer_step_end(self, trainer: Trainer, **kwargs: Any) -> None:
        self.leave(trainer.run_state.updates)

    def leave(self, updates: int) -> None:
        if updates == 2:
            os.chdir(self.other)
        if updates == 8:
            shutil.rmtree(self.other)


class FaceLeave(FaceCallback):
    def __init__(self, other: Path) -> None:
        self.leave = Leave(other)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.leave.other.mkdir(exist_ok=True) if state.global_step == 1 else None
        self.leave.leave(state.global_step)


NATIVE: list[Any] = [
    lambda: CSVLoggerCallback("log/log.csv"),
    lambda: JSONLoggerCallback("log.jsonl"),
    lambda: SaveBestModelCallback("best/best.pt"),
    lambda: ModelEmaCallback(save_path="ema.pt"),
    lambda: ReportCallback("page/report.html"),
    lambda: ResultCallback("page/result.json"),
    lambda: SaveTrainingStateCallback("states", save_every_n_epochs=1, background=True),
    lambda: WSDCheckpointCallback("wsd"),
    lambda: ProfilerCallback("profile", wait=6, warmup=1, active=1),
    lambda: TrackerCallback("tensorboard", folder="runs"),
]


def files_in(folder: Path) -> set[str]:
    """The files, without numbers that differ between runs."""
    names = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    return {name.partition("events.out")[0].partition("runs/")[0] for name in names}


@pytest.mark.parametrize("face", ["native", "Hugging Face"])
def test_all_files_are_where_they_would_have_been(face: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def train(home: Path, leaves: bool) -> Any:
        home.mkdir()
        monkeypatch.chdir(home)
        other = tmp_path / "other"
        if face == "native":
            trainer = a_trainer(*([Leave(other)] if leaves else []), *(make() for make in NATIVE))
            fit(trainer, create_scheduler_fn=WSDLrScheduler.create_scheduler_fn())
            return trainer.get_model()
        choices: dict[str, Any] = {"save_strategy": "epoch", "eval_strategy": "epoch", "load_best_model_at_end": True}
        choices |= {"report_to": "tensorboard", "num_train_epochs": 3, "save_total_limit": 2}
        face_trainer = make_trainer(Path("out"), *([FaceLeave(other)] if leaves else []), **choices)
        face_trainer.train()
        face_trainer.save_model()
        return face_trainer.model

    models = [train(tmp_path / name, leaves=name == "left") for name in ("stayed", "left")]
    torch.testing.assert_close(models[0].state_dict(), models[1].state_dict(), rtol=0, atol=0)
    assert files_in(tmp_path / "left") == files_in(tmp_path / "stayed")
    assert len(files_in(tmp_path / "left")) > 20
    assert not (tmp_path / "other").exists()
