"""The time that a run spends waiting for data is measured, shown, and followed by advice."""

import types
from collections.abc import Iterator
from typing import Any

import pytest
from torch import nn
from torch.utils.data import Dataset, IterableDataset

from pytorch_accelerated import Trainer
from pytorch_accelerated.callbacks import TrainerCallback
from pytorch_accelerated.record.step_records import EpochTiming, Pace
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
