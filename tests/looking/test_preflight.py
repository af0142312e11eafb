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


class Twice(torch.utils.data.Dataset[Any]):
    """Rows that a worker reads, and that two sets have: those of the second begin at 6."""

    def __init__(self, start: int, *, draws: bool = False) -> None:
        self.start, self.draws = start, draws

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> Any:
        row = torch.full((3,), float(self.start + index), dtype=torch.float64)
        return row + torch.rand(1) if self.draws else row, row[:2]


@pytest.mark.parametrize("workers", [0, 1])
def test_rows_that_training_and_evaluation_share_are_named(workers: int) -> None:
    data = torch.utils.data.TensorDataset(*regression_data(30))
    subsets = torch.utils.data.Subset(data, range(20)), torch.utils.data.Subset(data, [25, 3, 28, 19])
    pairs: list[Any] = [(subsets, (1, 3), (20, 4)), ((Twice(0), Twice(6)), (0, 1, 2, 3), (10, 10))]
    pairs += [
        ((Twice(0), Twice(10)), (), (10, 10)),
        ((Twice(0, draws=True), Twice(6, draws=True)), (0, 1, 2, 3), (10, 10)),
    ]
    for (train, evaluation), rows, compared in pairs:
        trainer = make_trainer()
        before = torch.get_rng_state()
        report = trainer.preflight(train, 1, evaluation, train_dataloader_kwargs={"num_workers": workers})
        assert torch.equal(before, torch.get_rng_state())
        assert report.shared == (rows, compared)
        words = f"{len(rows)} of {compared[1]} evaluation rows are among {compared[0]} training rows"
        assert words in str(report)
    assert make_trainer().preflight(data, 1).shared is None


A_SIGMOID = nn.Sequential(nn.Sigmoid(), nn.Unflatten(1, (1,)))
CLASSES, BINARY = torch.arange(12) % 3, (torch.arange(12) % 2).float()[:, None]


@pytest.mark.parametrize(
    ("loss_func", "targets", "wrong", "right", "words"),
    [
        (nn.CrossEntropyLoss(), CLASSES, nn.Softmax(1), nn.Identity(), "leave out the softmax"),
        (
            nn.BCEWithLogitsLoss(),
            BINARY,
            nn.Sequential(nn.Sigmoid(), nn.Unflatten(1, (1,))),
            nn.ReLU6(),
            "leave it out",
        ),
        (nn.NLLLoss(), CLASSES, nn.Identity(), nn.LogSoftmax(1), "use CrossEntropyLoss for scores"),
    ],
)
def test_outputs_that_the_loss_function_does_not_take_are_doubted(
    loss_func: nn.Module, targets: torch.Tensor, wrong: nn.Module, right: nn.Module, words: str
) -> None:
    for end, expected in ((wrong, words), (right, "")):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 3 if targets is CLASSES else 1), end)
        trainer = Trainer(model, loss_func, torch.optim.SGD(model.parameters(), lr=0.1), callbacks=())
        report = trainer.preflight((torch.randn(12, 4), targets), 1)
        assert expected in report.doubt
        assert report.doubt in str(report)
        assert bool(report.doubt) == bool(expected)
