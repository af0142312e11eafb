"""Rows of updates, and leaving rows out, on several ranks; or a run on one that is killed."""

import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch

from pytorch_accelerated import Trainer
from pytorch_accelerated.callbacks import SaveTrainingStateCallback, TrainerCallback
from tests.support.rows import check_leaving_out_on_ranks, check_rows_equal_the_log, loaders, train


class Killed(TrainerCallback):
    """Ends the process after a number of updates."""

    def __init__(self, updates: int) -> None:
        self.updates = updates

    def on_optimizer_step_end(self, trainer: Trainer, **kwargs: Any) -> None:
        if trainer.run_state.updates == self.updates:
            os.kill(os.getpid(), signal.SIGKILL)


folder = Path(sys.argv[1])
if "WORLD_SIZE" in os.environ:
    for name in loaders():
        check_rows_equal_the_log(name)
    assert torch.distributed.get_world_size() == int(os.environ["WORLD_SIZE"]) > 1
    check_leaving_out_on_ranks(folder)
    torch.distributed.destroy_process_group()
else:
    saver = SaveTrainingStateCallback(folder, save_every_n_steps=2)
    train(saver, Killed(11), leave_out={"rows": [4, 5], "updates": [3, 9]})
