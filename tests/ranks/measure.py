"""Runs on two ranks: a run of both is measured by both, and has what the first one has logged."""

import os
import sys
from pathlib import Path
from typing import Any

import torch

from tests.proving.runs import make, train
from tests.proving.test_measure import LoggedWeight, measured, weight

folder = Path(sys.argv[1])
changes: dict[str, Any] = {"per_device_batch_size": 4, "has_norm": False, "dataset": {"noise": 0.1}}
trainer, _ = train(folder, log := LoggedWeight(), every=5, **changes)
assert trainer.run_context.parts.ranks.count == int(os.environ["WORLD_SIZE"]) == 2
new, arguments = make(**changes)
history = new.measure(folder, weight, every=3, **arguments)
assert measured(history)["weight"] == {update: log.values[update] for update in range(3, 25, 3)}
torch.distributed.destroy_process_group()
