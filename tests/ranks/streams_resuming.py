"""Runs under torchrun on two ranks: runs over streams with a position, resumed anywhere, equal the uninterrupted one.

One rank has one batch less than the other. States are left in the given folder, for runs that resume on one process.
"""

import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch

from tests.support.streaming import Walk, check_everywhere, run, stateful

folder = Path(sys.argv[1])
rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
assert ranks == 2
warnings.filterwarnings("ignore", message="'set_vital' is deprecated")
sharded: dict[str, Any] = {"train_dataloader_kwargs": {"is_sharded": True}}
accumulated: dict[str, Any] = {**sharded, "gradient_accumulation_steps": 3}


def share() -> Walk:
    return Walk(13, rank=rank, ranks=ranks)


assert run(share(), num_epochs=1, **sharded)._ranks.count == ranks
check_everywhere(share, folder / "sharded", num_epochs=2, **sharded)
check_everywhere(Walk, folder / "cut", num_epochs=2)
check_everywhere(lambda: stateful(share(), num_workers=1), folder / "workers", num_epochs=2, **accumulated)
torch.distributed.destroy_process_group()
