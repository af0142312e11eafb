"""A rehearsal finds out early what would go wrong late; `test_summary.py` shows that it changes nothing."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pytorch_accelerated import Trainer
from pytorch_accelerated.callbacks import (
    DEFAULT_CALLBACKS,
    EarlyStoppingCallback,
    ModelEmaCallback,
    SaveBestModelCallback,
    SaveTrainingStateCallback,
    TrainerCallback,
)
from pytorch_accelerated.errors import CheckpointError, UnknownMetricError
from tests.support.reference import regression_data


class Counting(TrainerCallback):
    """A user's callback with a state and a metric."""

    count = 0

    def on_train_step_end(self, trainer: Trainer, **kwargs: Any) -> None:
        self.count += 1

    def on_eval_epoch_end(self, trainer: Trainer, **kwargs: Any) -> None:
        trainer.run_history.update_metric("score", 1.0)

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


def make_trainer(*callbacks: Any) -> Trainer:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2)).double()
    return Trainer(model, nn.MSELoss(), torch.optim.AdamW(model.parameters()), callbacks=callbacks)


def test_nothing_is_printed_written_or_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    counting = Counting()
    ema = ModelEmaCallback(save_path=tmp_path / "ema.pt")
    saving = SaveTrainingStateCallback(tmp_path / "states", save_every_n_epochs=1)
    trainer = make_trainer(*DEFAULT_CALLBACKS, counting, ema, saving, SaveBestModelCallback(tmp_path / "best.pt"))

    report = trainer.preflight(regression_data(20), 5, regression_data(7), per_device_batch_size=4)

    assert report.metric_names == ("train_loss_epoch", "eval_loss_epoch", "score")
    assert "Counting" in report.rehearsed
    assert "SaveBestModelCallback" in report.left_out
    assert report.state_size_bytes > 1000
    assert "one update" in str(report)
    assert capsys.readouterr().out == ""
    assert list(tmp_path.iterdir()) == []
    assert trainer.run_history.records == ()
    assert trainer.run_state == type(trainer.run_state)()
    assert counting.count == 0
    assert ema in trainer.callback_handler.callbacks


def test_a_watched_metric_that_nothing_records_is_found_before_the_run() -> None:
    trainer = make_trainer(EarlyStoppingCallback(watch_metric="accuracy"))
    with pytest.raises(UnknownMetricError, match="EarlyStoppingCallback watches 'accuracy'.*'eval_loss_epoch'"):
        trainer.preflight(regression_data(20), 2, regression_data(7))
    assert trainer.run_state == type(trainer.run_state)()


def test_a_disk_that_cannot_hold_what_will_be_saved_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make_trainer(SaveTrainingStateCallback(tmp_path / "states", max_checkpoints=3))
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=20_000))  # the disk, not our code
    with pytest.raises(CheckpointError, match="two training states of.*only 20.0 kB are free"):
        trainer.preflight(regression_data(20), 2)
