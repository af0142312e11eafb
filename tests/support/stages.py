"""A run whose parts join one after the other, for any number of ranks."""

import torch
from torch import nn

from pytorch_accelerated import Trainer
from pytorch_accelerated.callbacks import UnfreezeCallback
from tests.support.reference import regression_data


def trained_in_stages(ranks: int) -> Trainer:
    """Three epochs of updates of 12 samples: first the last layer, then all but one bias."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    stages = UnfreezeCallback({1: "^2", 2: "^0.weight"})
    trainer = Trainer(model, nn.MSELoss(), torch.optim.AdamW(model.parameters(), 0.05), callbacks=[stages], seed=1)
    trainer.train(regression_data(24), 3, per_device_batch_size=12 // ranks, gradient_clip_norm=0.5)
    return trainer
