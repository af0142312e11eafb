"""A run without an end, in the folder of the first argument. Files there say that a rank is ready, and how it left."""

import sys
from pathlib import Path

from pytorch_accelerated import Trainer
from pytorch_accelerated.callbacks import SaveTrainingStateCallback
from tests.support.reference import regression_data, tiny_trainer

folder = Path(sys.argv[1])


class Ready(Trainer):
    def training_run_epoch_end(self):
        (folder / f"ready {self._ranks.index}").touch()


trainer = tiny_trainer(SaveTrainingStateCallback(folder), base=Ready)
try:
    trainer.train(regression_data(24), 10**9)
except BaseException as error:
    (folder / f"left {trainer._ranks.index} {trainer.run_state.updates} {getattr(error, 'code', None)}").touch()
    raise
