"""Runs under torchrun: a run is saved, or resumed from the state of a run with another config and number of ranks."""

import json
import os
import sys
from pathlib import Path

import torch

from tests.support.zero import everything, make_model, make_trainer, saver, train

result, state, config = Path(sys.argv[1]), Path(sys.argv[2]), json.loads(sys.argv[3])
resumes = state.is_dir()
trainer = make_trainer(config, *([] if resumes else [saver(state.parent)]), model=make_model(dropout=0.0))
train(trainer, ranks=int(os.environ["WORLD_SIZE"]), resume_from=state if resumes else None)
results = everything(trainer)
if trainer._ranks.is_first:
    torch.save(results, result)
print("all is well", flush=True)
