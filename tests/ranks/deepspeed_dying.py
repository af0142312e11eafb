"""A run with DeepSpeed on two ranks: ``deepspeed_dying.py FOLDER CONFIG RANK OPERATION``.

RANK is killed right before that operation on the disk, counted from 0. Without a RANK both live, and each prints how
many operations it has needed. The run goes on from what it has saved before.
"""

import json
import sys
from pathlib import Path

import torch

from tests.checkpointing.faulty_disk import count_until_death
from tests.support.zero import everything, make_trainer, saver, train

folder, config, rank, dies_at = Path(sys.argv[1]), json.loads(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
trainer = make_trainer(config, saver(folder / "states", max_checkpoints=2))
operations = count_until_death(dies_at=dies_at if trainer._ranks.index == rank else None)
train(trainer, resume_from=folder / "states")
needed = operations()
results = everything(trainer)
if trainer._ranks.is_first:
    torch.save(results, folder / "results.pt")
print(needed)
