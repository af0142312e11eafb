"""A run of which one part dies, once: ``dying.py FOLDER HOW ITEM WORKERS``. Started again, it resumes and completes.

Prints a digest of the weights at the end.
"""

import ctypes
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset

from pytorch_accelerated import Trainer
from pytorch_accelerated.callbacks import SaveTrainingStateCallback
from tests.support.reference import regression_data, tiny_trainer
from tests.support.resuming import digests

folder, how, item, workers = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
folder.mkdir(exist_ok=True)


def die_once() -> None:
    """End this process, unless that has been done."""
    try:
        (folder / "died").touch(exist_ok=False)
    except FileExistsError:
        return
    if how == "crashed":
        ctypes.string_at(0)  # reads where nothing is
    os.kill(os.getpid(), signal.SIGKILL)


class Dying(Dataset[Any]):
    def __init__(self) -> None:
        self.rows = list(zip(*regression_data(24), strict=True))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        if workers and how != "never" and index == item % len(self):
            die_once()
        return self.rows[index]


class DyingTrainer(Trainer):
    def calculate_train_batch_loss(self, batch: Any) -> dict[str, Any]:
        is_the_one = how == f"rank {self._ranks.index} killed" and self.run_state.updates == item % 8
        if is_the_one:
            die_once()
        return super().calculate_train_batch_loss(batch)


saver = SaveTrainingStateCallback(folder / "states", save_every_n_steps=1, max_checkpoints=2)
trainer = tiny_trainer(saver, base=DyingTrainer, seed=5)
assert trainer._ranks.count == int(os.environ.get("WORLD_SIZE", "1"))
trainer.train(
    Dying(),
    num_epochs=2,
    per_device_batch_size=3,
    train_dataloader_kwargs={"num_workers": workers},
    resume_from=folder / "states",
)
if trainer._ranks.is_first:
    print(digests({"model": trainer.model.state_dict()}))
if torch.distributed.is_initialized():
    torch.distributed.destroy_process_group()
