"""Runs under torchrun on two ranks: everything that a run does, on a sharded model."""

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from pytorch_accelerated import Trainer
from pytorch_accelerated.callbacks import TrainerCallback
from pytorch_accelerated.errors import CheckpointError, ConfigurationError, InvalidCheckpointError, NonFiniteLossError
from pytorch_accelerated.utils import ModelEma
from tests.chaos.size import some
from tests.checkpointing.faulty_disk import FaultyDisk
from tests.support.reference import regression_data
from tests.support.resuming import SaveAndStop, assert_same
from tests.support.sharding import EVAL_ROWS, ROWS, everything, is_sharded, make_trainer, saver, train
from tests.support.states import verify

folder = Path(sys.argv[1])
from_one_process = folder / "of_one_process"


class GatheringTrainer(Trainer):
    """Gathers in a hook of evaluation, which a rank without a batch must answer."""

    rows: list[int]

    def calculate_eval_batch_loss(self, batch: Any) -> dict[str, Any]:
        output: dict[str, Any] = super().calculate_eval_batch_loss(batch)
        self.rows.append(len(self.gather(output["model_outputs"])))
        return output


class GatherInEvents(TrainerCallback):
    def __init__(self) -> None:
        self.rows: list[int] = []

    def on_eval_step_end(self, trainer: Trainer, batch: Any = None, **kwargs: Any) -> None:
        self.rows.append(len(trainer.gather(batch[0])))


# A whole run, and what it is compared with by the test.
whole_run = make_trainer(shards=True, dropout=0.3, callbacks=[saver(folder / "states")])
assert whole_run._ranks.count == int(os.environ["WORLD_SIZE"]) == 2
assert any(map(is_sharded, whole_run.model.parameters()))
train(whole_run, ranks=2)
expected = everything(whole_run)
found = whole_run.replay(folder / "states", 4)  # leaves the model as it was
assert found.loss == found.recorded_loss
assert_same(everything(whole_run), expected)
without_dropout = train(make_trainer(shards=True), ranks=2)
result = everything(without_dropout)
if whole_run._ranks.is_first:
    torch.save(result, folder / "two_ranks.pt")

# Resumed from every state, written in between or in the background, it ends the same to the bit.
train(make_trainer(shards=True, dropout=0.3, callbacks=[saver(folder / "later", background=True)]), ranks=2)
states = sorted((folder / "states").iterdir())
for state in [*some(states[::2], states), folder / "later" / "step_3"]:
    resumed = train(make_trainer(shards=True, dropout=0.3), ranks=2, resume_from=state)
    assert_same(everything(resumed), expected, str(state))

# It goes on from what one process has saved of the bare model, and leaves a state for one.
resumed = train(make_trainer(shards=True), ranks=2, resume_from=from_one_process)
result = everything(resumed)
if resumed._ranks.is_first:
    torch.save(result, folder / "one_then_two.pt")
train(make_trainer(shards=True, callbacks=[saver(folder / "for_one_process")]), ranks=2, max_num_train_steps=3)

# A file for one process, and back.
without_dropout.save_checkpoint(folder / "portable.pt")
without_dropout._ranks.wait()
other = make_trainer(shards=True)
other.load_checkpoint(folder / "portable.pt")
assert_same(everything(other)["model"], everything(without_dropout)["model"])
assert_same(everything(other)["optimizer"], everything(without_dropout)["optimizer"])

# Ranks without a batch go through the model with the others, and answer what these gather.
gathered = GatherInEvents()
gathering = GatheringTrainer(other.model, torch.nn.MSELoss(), None, callbacks=[gathered])
for rows in range(1, 6):
    gathered.rows, gathering.rows = [], []
    gathering.evaluate(regression_data(rows), per_device_batch_size=1)
    everyones = gathering._ranks.exchange(gathered.rows)
    assert max(map(sum, everyones)) == rows, (rows, everyones)
    assert sum(gathering.rows) == rows, (rows, gathering.rows)


# A loss that is not finite on one rank leaves an update out on both; a part that is not finite is not saved.
class BadOnOneRank(Trainer):
    def calculate_train_batch_loss(self, batch: Any) -> dict[str, Any]:
        output: dict[str, Any] = super().calculate_train_batch_loss(batch)
        if self._ranks.index == 1 and self.run_state.updates == 1:
            output["loss"] = output["loss"] * float("nan")
        return output


skipping = make_trainer(shards=True)
skipping = BadOnOneRank(skipping.model, torch.nn.MSELoss(), skipping.optimizer, callbacks=(), seed=3)
train(skipping, ranks=2, nonfinite_policy="skip")
assert skipping.run_state.skipped_updates == 1
assert all(torch.isfinite(value).all() for value in everything(skipping)["model"].values())
with torch.no_grad():
    first = next(skipping.model.parameters())
    if skipping._ranks.index == 1:
        first.to_local()[0] = float("nan")
for save, path in ((skipping.save_training_state, folder / "bad"), (skipping.save_checkpoint, folder / "bad.pt")):
    with pytest.raises(NonFiniteLossError, match="'0.weight'"):
        save(path)
assert not (folder / "bad").exists()
assert not (folder / "bad.pt").exists()

# What only rank 1 notices, here that its optimizer is another one, is refused by both, before anything has changed.
untouched = make_trainer(shards=True)
groups = untouched.optimizer.param_groups
if untouched._ranks.index == 1:
    groups.append({**groups[0], "params": []})
before = everything(untouched)["model"]
with pytest.raises(InvalidCheckpointError, match="param"):
    untouched.load_training_state(folder / "states" / "step_1")
assert_same(everything(untouched)["model"], before)
del groups[1:]

# A disk that is full for one rank fails the save of both, and leaves nothing behind but the state before.
full = folder / "full"
untouched.save_training_state(full / "state")
fails_at = 1 if untouched._ranks.index == 1 else None
with FaultyDisk(fails_at).installed(), pytest.raises(CheckpointError, match="No space left on device"):
    untouched.save_training_state(full / "state")
untouched._ranks.wait()
assert [path.name for path in full.iterdir()] == ["state"]
verify(full / "state")

# A rehearsal leaves the model as it was; a copy of a sharded model is refused.
untouched.preflight(regression_data(ROWS), 1, regression_data(EVAL_ROWS), per_device_batch_size=2)
assert_same(everything(untouched)["model"], before)
with pytest.raises(ConfigurationError, match="torch cannot copy"):
    ModelEma(untouched.model)

# Several optimizers, and activation checkpointing.
trainer = train(make_trainer(shards=True, several_optimizers=True), ranks=2)
result = everything(trainer)
if trainer._ranks.is_first:
    torch.save(result, folder / "several.pt")
stops = SaveAndStop(folder / "stopped", 3)
train(make_trainer(shards=True, several_optimizers=True, callbacks=[stops]), ranks=2)
resumed = train(make_trainer(shards=True, several_optimizers=True), ranks=2, resume_from=folder / "stopped")
assert_same(everything(resumed), result)
plain, again = (make_trainer(shards=True, dropout=0.3, checkpoints_activations=each) for each in (False, True))
assert_same(everything(train(again, ranks=2)), everything(train(plain, ranks=2)))
print("all is well")
torch.distributed.destroy_process_group()
