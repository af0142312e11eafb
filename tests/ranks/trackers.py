"""A run on scikit-learn's digits that logs to trackers: ``trackers.py FOLDER WORLD_SIZE TRACKERS [UPDATE [SIGNAL]]``.

It saves a state every 10 updates and resumes from the last one. After the given update all ranks send the signal, by
default SIGKILL, to themselves.
"""

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

from pytorch_accelerated import Trainer
from pytorch_accelerated.callbacks import (
    CSVLoggerCallback,
    LearningRateMonitorCallback,
    SaveTrainingStateCallback,
    TrackerCallback,
    TrainerCallback,
)

folder, world_size, names = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3].split(",")
killed_after = int(sys.argv[4]) if len(sys.argv) > 4 else None
signal_name = sys.argv[5] if len(sys.argv) > 5 else "SIGKILL"


class Kill(TrainerCallback):
    def on_optimizer_step_end(self, trainer, **kwargs):
        if trainer.run_state.updates == killed_after:
            os.kill(os.getpid(), signal.Signals[signal_name])


inputs, targets = load_digits(return_X_y=True)
data = TensorDataset(torch.tensor(inputs[:571] / 16).float(), torch.tensor(targets[:571]))
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 16), nn.Dropout(0.2), nn.ReLU(), nn.Linear(16, 10))
groups: list[dict[str, Any]] = [
    {"params": model[0].parameters(), "lr": torch.tensor(0.1)},
    {"params": model[3].parameters()},
]
optimizer = torch.optim.SGD(groups, lr=0.05)
callbacks = [
    LearningRateMonitorCallback(),
    TrackerCallback(names, folder=folder / "runs", run_name="digits", hyperparameters={"data": {"rows": len(data)}}),
    CSVLoggerCallback(folder / "metrics.csv"),
    SaveTrainingStateCallback(folder / "states", save_every_n_steps=10),
    Kill(),
]
trainer = Trainer(model, nn.CrossEntropyLoss(), optimizer, callbacks, seed=3)
assert trainer._ranks.count == world_size
history = trainer.train(
    data,
    2,
    data,
    per_device_batch_size=24 // world_size,
    gradient_clip_norm=1.0,
    resume_from=folder / "states",
    create_scheduler_fn=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 20),
)
if trainer._ranks.is_first:
    metrics = [[record.name, record.update, record.value] for record in history.records]
    steps = [[record.update, record.train_loss] for record in history.step_records]
    (folder / "history.json").write_text(json.dumps({"metrics": metrics, "steps": steps}))
