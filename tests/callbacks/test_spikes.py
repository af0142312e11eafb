"""A loss far above those before it is an event, with the updates and the samples that it came from."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from pytorch_accelerated import Trainer
from pytorch_accelerated.callbacks import LossSpikeCallback, SaveTrainingStateCallback, TrainerCallback
from pytorch_accelerated.errors import ConfigurationError
from pytorch_accelerated.extras.spikes import find_spikes
from tests.callbacks.runs import StopAfter
from tests.support.resuming import assert_same

BAD = 77


class Spikes(TrainerCallback):
    def __init__(self) -> None:
        self.seen: list[dict[str, Any]] = []

    def on_loss_spike(self, trainer: Trainer, **kwargs: Any) -> None:
        self.seen.append(kwargs)


def data() -> tuple[torch.Tensor, torch.Tensor]:
    """Rows that are easy to learn; the targets of one are far off."""
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(160, 3, generator=generator)
    targets = inputs.sum(1, keepdim=True) + 0.1 * torch.randn(160, 1, generator=generator)
    targets[BAD] = 60.0
    return inputs, targets


def train(*callbacks: TrainerCallback, num_epochs: int = 2, **arguments: Any) -> Trainer:
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    trainer = Trainer(model, nn.MSELoss(), torch.optim.SGD(model.parameters(), lr=1e-3), callbacks=callbacks, seed=5)
    trainer.train(data(), num_epochs, **{"per_device_batch_size": 2, "gradient_accumulation_steps": 2, **arguments})
    return trainer


def test_the_event_names_the_updates_and_the_samples(capsys: pytest.CaptureFixture[str]) -> None:
    spikes = Spikes()
    trainer = train(LossSpikeCallback(), spikes)
    assert [spike["epoch"] for spike in spikes.seen] == [1, 2]
    for spike in spikes.seen:
        assert BAD in spike["samples"]
        assert len(spike["samples"]) == 4
        assert spike["first_update"] == spike["last_update"]
        assert spike["loss"] > 100 * spike["median"]
        assert trainer.run_history.step_records[spike["last_update"] - 1].train_loss == spike["loss"]
    assert spikes.seen[1]["first_update"] > 40
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("Loss spike in epoch 2, update ")]
    assert len(lines) == 1
    assert str(BAD) in lines[0]


def test_weights_are_the_same_with_and_without_it() -> None:
    assert_same(train(LossSpikeCallback(threshold=0.5)).model.state_dict(), train().model.state_dict())


def test_a_resumed_run_reports_each_spike_once(tmp_path: Path) -> None:
    whole, before, after = Spikes(), Spikes(), Spikes()
    train(LossSpikeCallback(), whole)
    train(LossSpikeCallback(), before, StopAfter(57), SaveTrainingStateCallback(tmp_path))
    train(LossSpikeCallback(), after, SaveTrainingStateCallback(tmp_path), resume_from=tmp_path)
    assert before.seen + after.seen == whole.seen


def test_windows_are_those_before_each_loss_whatever_comes_at_once() -> None:
    losses = 1 + 0.1 * np.random.default_rng(0).standard_normal(400)
    losses[[5, 20, 150, 151, 399]] += 5
    losses[200] = np.nan
    one_by_one = [
        found for at in range(400) for found in find_spikes(losses[max(0, at - 128) : at + 1], min(at, 128), 8)
    ]
    assert [at for at, _ in find_spikes(losses, 0, 8)] == [20, 150, 151, 399]
    assert len(one_by_one) == 4
    at_once = [find_spikes(losses[max(0, at - 128) : at + 64], min(at, 128), 8) for at in range(0, 400, 64)]
    assert sum(map(len, at_once)) == 4
    assert find_spikes(np.full(100, 2.0), 0, 8) == []
    assert find_spikes(np.full(100, np.nan), 50, 8) == []


@pytest.mark.parametrize("threshold", [0, -1, float("nan"), "8"])
def test_a_threshold_must_be_a_number_above_0(threshold: Any) -> None:
    with pytest.raises(ConfigurationError, match="give a number above 0"):
        LossSpikeCallback(threshold)
