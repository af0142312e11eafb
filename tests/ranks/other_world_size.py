"""Resumes a run of a different number of processes, or saves one for them: ``other_world_size.py FOLDER MODE``.

The global batch stays the same, so the whole run is the same up to rounding, for any number of processes.
"""

import json
import os
import sys
from pathlib import Path

import torch

from tests.support.reference import regression_data, tiny_trainer
from tests.support.resuming import SaveAndStop

folder, mode = Path(sys.argv[1]), sys.argv[2]
ranks = int(os.environ.get("WORLD_SIZE", "1"))
saver = [SaveAndStop(folder / "state", updates=7)] if mode == "save" else []
trainer = tiny_trainer(*saver, seed=5)
assert trainer._ranks.count == ranks
history = trainer.train(
    regression_data(38),
    num_epochs=2,
    per_device_batch_size=4 // ranks,
    gradient_clip_norm=1.0,
    resume_from=folder / "state" if mode == "resume" else None,
)
if trainer._ranks.is_first:
    metrics = {name: list(history.get_metric_values(name)) for name in ("train_loss_epoch", "gradient_norm")}
    print(json.dumps({"weights": trainer.model.state_dict()["0.weight"].tolist(), **metrics}))
if torch.distributed.is_initialized():
    torch.distributed.destroy_process_group()
