"""A run on several ranks that saves after each epoch, and resumes: ``restarting.py FOLDER``.

With a file `kill` in the folder the last rank removes it, and kills itself in the middle of the third epoch. Rank 0
writes a digest of the weights to the file `digest` at the end.
"""

import os
import signal
import sys
from pathlib import Path

import torch
from torch import nn

from pytorch_accelerated import Trainer
from pytorch_accelerated.callbacks import SaveTrainingStateCallback, TrainerCallback
from tests.support.reference import regression_data, sgd, tiny_model
from tests.support.resuming import digests

folder = Path(sys.argv[1])


class KillOnce(TrainerCallback):
    def on_train_step_end(self, trainer, **kwargs):
        state, order = trainer.run_state, folder / "kill"
        is_there = state.epochs == 2 and state.updates_in_epoch == 1
        if trainer._ranks.index == trainer._ranks.count - 1 and is_there and order.exists():
            order.unlink()
            os.kill(os.getpid(), signal.SIGKILL)


torch.manual_seed(0)
model = tiny_model()
saver = SaveTrainingStateCallback(folder / "states", save_every_n_epochs=1)
trainer = Trainer(model, nn.MSELoss(), sgd(model), callbacks=[KillOnce(), saver], seed=3)
assert trainer._ranks.count == 2
trainer.train(regression_data(24), 4, per_device_batch_size=2, resume_from=folder / "states")
if trainer._ranks.is_first:
    (folder / "digest").write_text(str(digests({"model": model.state_dict()})))
