"""Runs on any number of ranks: ``rank_differences.py FOLDER MODE``, with callbacks whose states differ between ranks.

``save`` trains and saves after three updates, ``resume`` resumes from there; both end after the second epoch. The final
states of the callbacks and the history are printed as JSON.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

from pytorch_accelerated import Trainer
from pytorch_accelerated.callbacks import ModelEmaCallback, TrainerCallback
from tests.support.reference import regression_data, sgd

folder, mode = Path(sys.argv[1]), sys.argv[2]
rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


class Mine(TrainerCallback):
    """Counts what this rank has seen; a table is the same on all ranks."""

    def __init__(self, save_after: int | None = None) -> None:
        self.save_after = save_after
        self.state: dict[str, Any] = {
            "sums": {"inputs": 0.0, "updates": 0},
            "rows": torch.zeros(2, dtype=torch.float64),
            "table": torch.arange(1000.0),
            "seen": [],
        }

    def on_train_step_end(self, trainer: Trainer, batch: Any, **kwargs: Any) -> None:
        self.state["sums"]["inputs"] += float(batch[0].sum())
        self.state["rows"] += batch[1].sum(0)
        self.state["seen"].append(round(float(batch[0][0, 0]), 6))

    def on_optimizer_step_end(self, trainer: Trainer, **kwargs: Any) -> None:
        self.state["sums"]["updates"] += 1
        trainer.run_history.update_metric("mine", 100 * rank + trainer.run_state.updates)
        if trainer.run_state.updates == self.save_after:
            trainer.save_training_state(folder / "state")

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


class OfLastRank(Mine):
    """One that other ranks do not have."""


class Shared(TrainerCallback):
    """One whose state is the same on all ranks."""

    def state_dict(self) -> dict[str, Any]:
        return {"weights": torch.ones(500), "none": None}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert torch.equal(state["weights"], torch.ones(500))


model = nn.Sequential(nn.Linear(3, 40), nn.BatchNorm1d(40), nn.Linear(40, 2)).double()
with torch.no_grad():
    for parameter in model.parameters():
        parameter.copy_(torch.linspace(-0.5, 0.4, parameter.numel()).double().reshape(parameter.shape))
mine = Mine(3 if mode == "save" else None)
average = ModelEmaCallback(0.5, save_path=folder / "ema.pt")
callbacks = [mine, Shared(), average, *([OfLastRank()] if rank == ranks - 1 and ranks > 1 else [])]
trainer = Trainer(model, nn.MSELoss(), sgd(model), callbacks=callbacks, seed=5)
assert trainer._ranks.count == ranks
data = regression_data(20)
history = trainer.train(
    data, 2, data, per_device_batch_size=4 // ranks, resume_from=folder / "state" if mode == "resume" else None
)
states = {type(callback).__name__: callback.state_dict() for callback in trainer.callback_handler}
for state in states.values():
    for name in ("rows", "table", "weights", "ema_model"):
        value = state.get(name)
        if name in state:
            tensors = value if isinstance(value, dict) else {"": value}
            state[name] = {key: tensor.tolist() for key, tensor in tensors.items()}
print(json.dumps({"states": states, "mine": list(history.get_metric_values("mine"))}))
if torch.distributed.is_initialized():
    torch.distributed.destroy_process_group()
