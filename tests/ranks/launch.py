"""A script as a user would write it; prints facts about the processes it trained on."""

import json
import warnings

import torch
from torch import nn
from torch.utils.data import TensorDataset

from pytorch_accelerated import Trainer
from pytorch_accelerated.callbacks import TrainerCallback
from pytorch_accelerated.utils import local_process_zero_first, local_process_zero_only, world_process_zero_only


class Count(TrainerCallback):
    rows = 0

    def on_train_step_end(self, trainer, batch, **kwargs):
        self.rows += len(batch[0])


@world_process_zero_only
def once():
    return "once"


@local_process_zero_only
def once_per_node():
    return "once per node"


@local_process_zero_first
def prepare():
    return "prepared"


def decorated():
    return [once(), once_per_node(), prepare()]


torch.manual_seed(0)
decorated_before = decorated()  # a download comes before there is a trainer
model = nn.Linear(2, 1)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    trainer = Trainer(model, nn.MSELoss(), torch.optim.SGD(model.parameters(), lr=0.1), callbacks=[count := Count()])
trainer.train(TensorDataset(torch.randn(13, 2), torch.randn(13, 1)), num_epochs=1, per_device_batch_size=2)
config = trainer.run_config
trainer.print("printed")
facts = {
    "rank": trainer._ranks.index,
    "processes": config.num_processes,
    "is_distributed": config.is_distributed,
    "is_first": [config.is_world_process_zero, config.is_local_process_zero],
    "batch": config.train_total_batch_size,
    "updates": trainer.run_state.updates,
    "rows": count.rows,
    "weights": model.weight.tolist(),
    "decorated_before": decorated_before,
    "decorated": decorated(),
    "warnings": [str(warning.message) for warning in caught],
}
print(json.dumps(facts))
