"""A run without an end, in the folder of the first argument. Files there say that a rank is ready, and how it left."""

import sys
from pathlib import Path

from torch import nn

from pytorch_accelerated import Trainer
from pytorch_accelerated.callbacks import SaveTrainingStateCallback
from tests.support.reference import regression_data, sgd, tiny_model

folder = Path(sys.argv[1])


class Ready(Trainer):
    def training_run_epoch_end(self):
        (folder / f"ready {self._ranks.index}").touch()


model = tiny_model()
trainer = Ready(model, nn.MSELoss(), sgd(model), callbacks=[SaveTrainingStateCallback(folder)])
try:
    trainer.train(regression_data(24), 10**9)
except BaseException as error:
    (folder / f"left {trainer._ranks.index} {trainer.run_state.updates} {getattr(error, 'code', None)}").touch()
    raise
