"""Two ranks with the Hugging Face trainer; the second exits in the fourth update. Takes a folder.

Rank 0 prints its error.
"""

import os
import sys

import torch
from torch import nn

from pytorch_accelerated.errors import LostPeerError
from pytorch_accelerated.huggingface import Trainer, TrainerCallback, TrainingArguments


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(1, 1)

    def forward(self, inputs, labels):
        return {"loss": nn.functional.mse_loss(self.linear(inputs), labels)}


class LoseOne(TrainerCallback):
    def on_step_begin(self, args, state, control, **kwargs):
        if args.process_index == 1 and state.global_step == 3:
            os._exit(0)


args = TrainingArguments(sys.argv[1], ddp_timeout=300, save_steps=2, max_steps=9, report_to=[], disable_tqdm=True)
assert args.world_size == 2
rows = [{"inputs": torch.ones(1), "labels": torch.zeros(1)}] * 160
trainer = Trainer(Model(), args, train_dataset=rows, callbacks=[LoseOne()])
try:
    trainer.train()
except LostPeerError as error:
    print(error)
