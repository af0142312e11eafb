"""Runs on two ranks: what callbacks, averages and saves in the background do there. Argument: a folder."""

import os
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pytorch_accelerated import Trainer
from pytorch_accelerated.callbacks import (
    ConvertSyncBatchNormCallback,
    CSVLoggerCallback,
    EarlyStoppingCallback,
    ModelEmaCallback,
    ProfilerCallback,
    SaveBestModelCallback,
    SaveTrainingStateCallback,
    TerminateOnNaNCallback,
)
from pytorch_accelerated.errors import CheckpointError, NonFiniteLossError
from pytorch_accelerated.ranks.averaging import ModelEma
from pytorch_accelerated.states import disk
from pytorch_accelerated.states.verify import list_states
from tests.callbacks import test_means
from tests.callbacks.runs import Score, a_trainer, assert_same_weights, fit, values_of, weights_of
from tests.checkpointing.faulty_disk import FaultyDisk
from tests.models import test_averaging
from tests.support.reference import regression_data, tiny_trainer

os.chdir(sys.argv[1])
means = test_means.make()
ranks = means._ranks
assert ranks.count == int(os.environ["WORLD_SIZE"]) == 2


# Means are over the samples of both.
test_means.train(means)
for prefix in ("train", "eval"):
    names = [f"{prefix}_small_loss", f"{prefix}_squares", f"{prefix}_loss_epoch"]
    for *parts, whole in zip(*map(means.run_history.get_metric_values, names), strict=True):
        assert sum(parts) == pytest.approx(whole, rel=1e-12), (prefix, parts)

# Only the first one writes a log.
writes: list[str] = []
move = disk.move


def noted(source: Path, target: Path) -> None:
    writes.append(target.name)
    move(source, target)


with pytest.MonkeyPatch.context() as patch:
    patch.setattr(disk, "move", noted)
    tiny_trainer(CSVLoggerCallback("log.csv")).train(regression_data(20), 2)
assert writes == ["log.csv"] * (2 - 2 * ranks.index)


# Both end together and with the same reason, of which one may know nothing.
class OneBadRank(Trainer):
    def calculate_train_batch_loss(self, batch: Any) -> dict[str, Any]:
        output = super().calculate_train_batch_loss(batch)
        if self._ranks.index == 1 and self.run_state.batches_in_epoch == 2:
            output["loss"] = output["loss"] * float("nan")
        return output


class OwnScores(Trainer):
    def eval_epoch_end(self) -> None:
        # Each rank has another opinion; that of rank 0 counts.
        self.run_history.update_metric("score", (self._ranks.index or -1) * self.run_history.current_epoch)


with pytest.raises(NonFiniteLossError, match="^In epoch 1, the loss of batch 2 "):
    tiny_trainer(TerminateOnNaNCallback, base=OneBadRank).train(regression_data(20), 3, per_device_batch_size=1)
stopping = EarlyStoppingCallback(2, watch_metric="score", greater_is_better=True)
stopped = tiny_trainer(stopping, base=OwnScores)
stopped.train(regression_data(20), 9, regression_data(5))
assert (stopped.run_state.epochs, stopping.best_metric) == (3, -1.0)

# On the CPU batch norm stays as it is, and the first one says so.
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    norms = a_trainer(ConvertSyncBatchNormCallback)
said = [str(warning.message)[:46] for warning in caught]
assert said == ["ConvertSyncBatchNormCallback does nothing here"] * (1 - ranks.index)
fit(norms, num_epochs=1)
assert type(norms.get_model()[1]) is nn.BatchNorm1d

# Each has a profile of its own.
tiny_trainer(ProfilerCallback("profiles", wait=1, warmup=1, active=2)).train(regression_data(40), 1)
ranks.wait()
files = {f"{kind}_rank_{rank}.{end}" for kind, end in (("table", "txt"), ("trace", "json")) for rank in range(2)}
assert {path.name for path in Path("profiles").iterdir()} == files


# The best model and states are saved once, and both load the same.
def savers() -> list[Any]:
    watched: dict[str, Any] = {"max_checkpoints": 2, "keep_best": 1, "watch_metric": "score"}
    return [
        Score([3.0, 1.0, 2.0]),
        SaveBestModelCallback(watch_metric="score"),
        ModelEmaCallback(decay=0.5),
        SaveTrainingStateCallback(save_every_n_epochs=1, save_every_n_steps=2, save_every_n_minutes=100, **watched),
    ]


saving = a_trainer(*savers())
history = fit(saving)
assert saving.callback_handler.callbacks[1].best_metric_epoch == 2
assert_same_weights(weights_of(saving.model), torch.load("best_model.pt")["model_state_dict"])
ranks.wait()
resumed = a_trainer(*savers())
assert values_of(fit(resumed, resume_from="training_states/epoch_2")) == values_of(history)
assert_same_weights(weights_of(resumed.model), weights_of(saving.model))
ranks.wait()
assert {path.name for path, _ in list_states(Path("training_states"))} == {"epoch_2", "epoch_3", "final"}

# Both have one average.
for evaluate in (True, False):
    average, again = (ModelEmaCallback(0.5, evaluate, f"{evaluate}.pt", greater_is_better=True) for _ in range(2))
    whole_run = a_trainer(average, SaveTrainingStateCallback(f"states_{evaluate}", save_every_n_epochs=1))
    history = fit(whole_run)
    assert average.ema_model is not None
    everyones = ranks.exchange(weights_of(average.ema_model.module))
    assert_same_weights(everyones[0], everyones[1])
    assert len(set(map(str, ranks.exchange(values_of(history))))) == 1
    assert values_of(fit(a_trainer(again), resume_from=f"states_{evaluate}/epoch_2")) == values_of(history)
    ranks.wait()
    assert again.ema_model is not None
    assert_same_weights(weights_of(again.ema_model.module), weights_of(average.ema_model.module))


# A data-parallel model is matched by its own names.
def check_a_data_parallel_model(model: nn.Module) -> None:
    wrapped = DistributedDataParallel(model)
    of_model, of_wrapped = ModelEma(model, decay=0.5), ModelEma(wrapped, decay=0.5)
    assert type(of_wrapped.module) is type(model)

    def update() -> None:
        of_model.update(wrapped)
        of_wrapped.update(model)

    test_averaging.train(wrapped, 3, update, first_row=8 * ranks.index)
    assert list(of_model.module.state_dict()) == list(model.state_dict())
    for name, entry in model.state_dict().items():
        value = test_averaging.average(of_model, name)
        assert torch.equal(value, test_averaging.average(of_wrapped, name)), name
        if name.endswith(("weight", "bias")):
            assert not torch.equal(value, entry), name
            by_rank = [torch.empty_like(entry) for _ in range(2)]
            dist.all_gather(by_rank, value)
            assert torch.equal(*by_rank), name


check_a_data_parallel_model(test_averaging.make_model())
check_a_data_parallel_model(test_averaging.NamedModule())


# Both learn about a save in the background that failed.
def saved_in_background(name: str) -> Trainer:
    trainer = tiny_trainer(SaveTrainingStateCallback(name, save_every_n_steps=2, background=True), seed=3)
    trainer.train(regression_data(24), 2, per_device_batch_size=4)
    return trainer


saved_in_background("whole")
ranks.wait()
assert {path.name for path, _ in list_states(Path("whole"))} == {"final", "step_2", "step_4", "step_6"}
with FaultyDisk(6).installed(), pytest.raises(CheckpointError, match="No space left"):
    saved_in_background("failed")
