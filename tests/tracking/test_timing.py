"""The time that a run spends waiting for data is measured, shown, and followed by advice."""

import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, IterableDataset

from pytorch_accelerated import Trainer
from pytorch_accelerated.callbacks import TrainerCallback
from pytorch_accelerated.huggingface import Trainer as HuggingFaceTrainer
from pytorch_accelerated.huggingface import TrainingArguments
from pytorch_accelerated.record.step_records import EpochTiming, Pace
from tests.huggingface.runs import Regression, Rows
from tests.support.reference import regression_data, sgd, tiny_model

WAIT, WORK = 3.0, 1.0


class Clock:
    """A clock that only those who use it move."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        for module in ("data.planned_loader", "data.stream_loader", "record.step_records"):
            times = types.SimpleNamespace(perf_counter=lambda: self.now)
            monkeypatch.setattr(f"pytorch_accelerated.{module}.time", times)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


class Slow(Dataset[Any]):
    """Eight rows that take their time, each."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.rows = list(zip(*regression_data(8), strict=True))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        self.clock.now += WAIT
        return self.rows[index]


class SlowStream(IterableDataset[Any]):
    def __init__(self, clock: Clock) -> None:
        self.rows = Slow(clock)

    def __iter__(self) -> Iterator[Any]:
        return map(self.rows.__getitem__, range(len(self.rows)))


def trainer_at(clock: Clock, *callbacks: Any) -> Trainer:
    model = tiny_model()
    model.register_forward_hook(lambda *_: setattr(clock, "now", clock.now + WORK))
    return Trainer(model, nn.MSELoss(), sgd(model), callbacks=callbacks)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("steps", [1, 3])
def test_each_epoch_has_its_time_and_what_of_it_was_waited(clock: Clock, stream: bool, steps: int) -> None:
    data = SlowStream(clock) if stream else Slow(clock)
    kwargs = {"num_workers": 0}
    history = trainer_at(clock).train(
        data, 2, per_device_batch_size=2, gradient_accumulation_steps=steps, train_dataloader_kwargs=kwargs
    )
    expected = [EpochTiming(epoch, 8 * WAIT + 4 * WORK, 8 * WAIT, 0) for epoch in (1, 2)]
    assert list(history.timings) == expected
    assert history.timings[0].data_wait_share == pytest.approx(24 / 28)


@pytest.mark.parametrize(
    ("wait", "work", "processors", "workers"),
    [
        (3.0, 3.0, 8, 2),  # one worker would be as fast as a step, and have no time for anything else
        (3.0, 2.0, 8, 2),
        (3.0, 1.0, 8, 4),
        (3.0, 1.0, 2, 2),
        (3.0, 0.1, 64, 8),
        (3.0, 100.0, 8, 0),  # little to gain
        (0.1, 0.1, 8, 0),  # under a second
        (3.0, 1.0, 1, 0),  # nobody computes while a worker reads
    ],
)
def test_one_line_after_the_first_epoch_has_the_number_of_workers_to_give(
    wait: float,
    work: float,
    processors: int,
    workers: int,
    clock: Clock,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("pytorch_accelerated.loop.training.usable_processors", lambda: processors)
    monkeypatch.setattr(f"{__name__}.WAIT", wait)
    monkeypatch.setattr(f"{__name__}.WORK", 2 * work)  # of a batch
    for data, epochs in ((Slow(clock), 3), (SlowStream(clock), 1)):
        trainer_at(clock).train(data, epochs, per_device_batch_size=2)
    share = f"{8 * wait / (8 * wait + 8 * work):.0%}"
    line = f'{share} of the time in epoch 1. Workers would read it meanwhile: train_dataloader_kwargs={{"num_workers": '
    printed = capsys.readouterr().out
    assert printed == (
        f"Waited for data {line}{workers}}}, or DataLoader(..., num_workers={workers})\n" if workers else ""
    )


def test_the_line_of_the_hugging_face_trainer_names_its_argument(
    clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class SlowRows(Rows):
        def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
            clock.now += WAIT
            return super().__getitem__(index)

    monkeypatch.setattr("pytorch_accelerated.loop.training.usable_processors", lambda: 3)
    arguments: dict[str, Any] = {
        "num_train_epochs": 2,
        "per_device_train_batch_size": 2,
        "report_to": "none",
        "save_strategy": "no",
    }
    for workers in (0, 1):
        made = TrainingArguments(str(tmp_path), **arguments, dataloader_num_workers=workers, disable_tqdm=True)
        HuggingFaceTrainer(Regression(), made, train_dataset=SlowRows(8)).train()
        found = [line for line in capsys.readouterr().out.splitlines() if line.startswith("Waited")]
        line = "Waited for data 100% of the time in epoch 1. Workers would read it meanwhile: dataloader_num_workers=3"
        assert found == [line][workers:]


def test_evaluations_inside_an_epoch_do_not_count(clock: Clock) -> None:
    class Evaluate(TrainerCallback):
        def on_train_epoch_start(self, trainer: Trainer, **kwargs: Any) -> None:
            trainer.request_evaluation()

        def on_optimizer_step_end(self, trainer: Trainer, **kwargs: Any) -> None:
            trainer.request_evaluation()

    history = trainer_at(clock, Evaluate()).train(
        Slow(clock), 1, Slow(clock), per_device_batch_size=2, train_dataloader_kwargs={"num_workers": 0}
    )
    assert list(history.timings) == [EpochTiming(1, 8 * WAIT + 4 * WORK, 8 * WAIT, 0)]


@pytest.mark.parametrize("seconds_per_update", [0.001, 0.03, 0.5, 10.0])
def test_a_pace_keeps_about_so_many_seconds_between_two_times(seconds_per_update: float):
    now = 0.0
    pace = Pace(1.0, clock=lambda: now, updates=7)
    times = []
    for updates in range(8, 8 + 5_000):
        now += seconds_per_update
        if pace.is_due(updates):
            pace.go_on(updates, pace.proposal(updates))
            times.append(now)
    assert times[0] == pytest.approx(seconds_per_update)  # the first update, so that a slow one is not waited for
    gaps = [later - earlier for earlier, later in zip(times, times[1:], strict=False)]
    longest = max(1.0, seconds_per_update)
    assert max(gaps) <= longest * (1 + 1e-9)
    assert gaps[-2] == pytest.approx(longest, abs=seconds_per_update)
