"""A rank on a separate host: trains, and trains again until the cable is cut. Prints a line for each.

Arguments: a folder for progress files, and the seconds that a rank waits for the other.
"""

import sys
import time
from pathlib import Path

import torch
from torch import nn

from pytorch_accelerated import Trainer
from pytorch_accelerated.callbacks import TrainerCallback
from pytorch_accelerated.errors import LostPeerError
from tests.support.reference import regression_data, sgd, tiny_model

folder, seconds = Path(sys.argv[1]), float(sys.argv[2])


class Tell(TrainerCallback):
    is_told = False

    def on_optimizer_step_end(self, trainer, **kwargs):
        if self.is_told:
            time.sleep(0.02)
            (folder / f"at work {trainer._ranks.index}").touch()


torch.manual_seed(0)
model = tiny_model()
trainer = Trainer(model, nn.MSELoss(), sgd(model), callbacks=[tell := Tell()], seed=3, timeout=seconds)
ranks = trainer._ranks
assert ranks.count == 2
assert ranks.is_first_of_node
trainer.train(regression_data(24), 2, per_device_batch_size=2)
print("trained", trainer.run_state.updates, next(model.parameters()).flatten().tolist(), flush=True)
tell.is_told = True
try:
    trainer.train(regression_data(24), 10**6, per_device_batch_size=2)
except LostPeerError as error:
    print(error, flush=True)
