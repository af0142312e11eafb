"""A rank on a separate host: trains, and prints the weights."""

import torch
from torch import nn

from pytorch_accelerated import Trainer
from tests.support.reference import regression_data, sgd, tiny_model

torch.manual_seed(0)
model = tiny_model()
trainer = Trainer(model, nn.MSELoss(), sgd(model), callbacks=(), seed=3)
assert trainer._ranks.count == 2
assert trainer._ranks.is_first_of_node
trainer.train(regression_data(24), 2, per_device_batch_size=2)
print("trained", trainer.run_state.updates, next(model.parameters()).flatten().tolist(), flush=True)
