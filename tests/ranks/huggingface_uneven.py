"""Runs on one or two ranks whose updates use the same rows; the results go to a file.

On two ranks, some updates have no rows for one of them.
"""

import os
import sys
from pathlib import Path
from typing import Any

import torch

from tests.huggingface.runs import Rows, Stream, Tokens, make_trainer, without_speed

folder, ranks, rank = Path(sys.argv[1]), int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
found: dict[str, Any] = {}
cases: dict[str, dict[str, Any]] = {
    "17 rows": {"parts": {"train_dataset": Rows(17)}},
    "17 rows, accumulated": {"parts": {"train_dataset": Rows(17)}, "gradient_accumulation_steps": 2},
    "17 rows, logged now and then": {"parts": {"train_dataset": Rows(17)}, "logging_steps": 2},
    "17 rows, logged by the epoch": {"parts": {"train_dataset": Rows(17)}, "logging_strategy": "epoch"},
    "tokens": {"parts": {"train_dataset": Rows(17), "model": Tokens()}},
    "one row": {"parts": {"train_dataset": Rows(1)}},
    "a stream": {"parts": {"train_dataset": Stream(11)}, "max_steps": 5},
}
for name, arguments in cases.items():
    trainer = make_trainer(folder / name, per_device_train_batch_size=8 // ranks, optim="sgd", **arguments)
    assert trainer.args.world_size == ranks
    output = trainer.train()
    history = without_speed(trainer.state.log_history)
    found[name] = {"model": trainer.model.state_dict(), "history": history, "loss": output.training_loss}
torch.save(found, folder / f"{ranks}-{rank}.pt")
print("done")
