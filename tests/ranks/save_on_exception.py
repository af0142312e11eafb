"""Runs under torchrun: `save_on_exception` says that it has no effect on several ranks, and an error ends the run."""

import os
import tempfile
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pytorch_accelerated import Trainer
from pytorch_accelerated.callbacks import SaveTrainingStateCallback, TrainerCallback
from tests.support.reference import regression_data

assert int(os.environ["WORLD_SIZE"]) == 2


class Fails(TrainerCallback):
    def on_train_step_start(self, trainer: Trainer, **kwargs: Any) -> None:
        if trainer.run_state.updates == 2:
            raise ValueError("broken on every rank")


with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    model = nn.Linear(3, 2).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    saver = SaveTrainingStateCallback(folder, save_on_exception=True)
    trainer = Trainer(model, nn.MSELoss(), optimizer, callbacks=[Fails(), saver])
    with pytest.raises(ValueError, match="broken on every rank"):
        trainer.train(regression_data(24), num_epochs=1, per_device_batch_size=2)
    assert not (Path(folder) / "final").exists()
    told = ["`save_on_exception` has no effect" in str(each.message) for each in caught]
    assert sum(told) == (1 if os.environ["RANK"] == "0" else 0), told
