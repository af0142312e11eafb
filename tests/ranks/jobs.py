"""Parts that join later, and a pruned trial, on several ranks. Argument: a folder with what one process made."""

import os
import sys
from pathlib import Path

import optuna
import pytest
import torch
from torch import nn

from pytorch_accelerated import Trainer
from pytorch_accelerated.callbacks import OptunaCallback
from tests.support.reference import regression_data
from tests.support.resuming import assert_same
from tests.support.stages import trained_in_stages

folder = Path(sys.argv[1])
ranks = int(os.environ["WORLD_SIZE"])
trainer = trained_in_stages(ranks)
assert trainer._ranks.count == ranks
everyones = trainer._ranks.exchange(trainer.get_model().state_dict())
for own in everyones:
    assert_same(dict(own), dict(torch.load(folder / "alone.pt")), tolerance=1e-12)

optuna.logging.set_verbosity(optuna.logging.ERROR)
study = optuna.create_study(pruner=optuna.pruners.ThresholdPruner(upper=1e-9, n_warmup_steps=2))
trial = study.ask() if trainer._ranks.is_first else None
model = nn.Linear(3, 2).double()
searching = Trainer(
    model, nn.MSELoss(), torch.optim.SGD(model.parameters(), 0.01), callbacks=[OptunaCallback(trial)], seed=1
)
with pytest.raises(optuna.TrialPruned):
    searching.train(regression_data(12), 5, regression_data(12), per_device_batch_size=2)
assert searching.run_history.current_epoch == 3  # two are over
torch.distributed.destroy_process_group()
