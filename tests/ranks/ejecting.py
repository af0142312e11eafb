"""Runs under torchrun: a run on multiple ranks and its script on as many end with the same bits on each of them.

Arguments: an empty folder; how many random runs there are, besides the set-ups.
"""

import os
import re
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import TensorDataset

from pytorch_accelerated.errors import ConfigurationError
from tests.ejecting.comparing import compare
from tests.ejecting.setups import SETUPS, NoisyTrainer, data, random_setup, run

folder, seeds = Path(sys.argv[1]), range(int(sys.argv[2]))
trainer, arguments = run()
assert trainer._ranks.count == int(os.environ["WORLD_SIZE"]) > 1

# Counts that weigh, statistics and dropout of each rank, draws within batches, hooks that call ours, files.
few = ("weighted_loss", "averaging", "random_augmentation", "hooks_that_call_ours", "stopping_early_with_the_best")
makers: dict[str, Any] = {each.__name__: each for each in SETUPS if seeds or each.__name__ in few}
for name, make_run in makers.items():
    compare(make_run, folder / name)

compared = 0
for seed in seeds:
    make_run = partial(random_setup, seed)
    try:
        compare(make_run, folder / str(seed))
        compared += 1
    except ConfigurationError as error:
        if not re.search("rows on a rank|it has no updates", str(error)):
            raise
assert compared >= len(seeds) // 2

odd = TensorDataset(*data(8 * trainer._ranks.count + 1))
compare(partial(run, nn.Dropout(0.2), train_dataset=odd), folder / "odd")  # one row is left for all ranks

outside = nn.Parameter(torch.zeros(1))
options = Accelerator(cpu=True, kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)])
for reason, given in (
    ("none of the last 1 rows on a rank", {"kind": NoisyTrainer, "train_dataset": odd}),
    ("outside of the model", {"optimizer": lambda parameters: torch.optim.SGD([*parameters, outside], 0.1)}),
    ("MULTI_CPU find_unused_parameters", {"accelerator": options}),
):
    trainer, arguments = run(**given)
    with pytest.raises(ConfigurationError, match=reason):
        trainer.eject(folder / "none.py", **arguments)
trainer, arguments = run()
fully_shard(trainer.model, mesh=init_device_mesh("cpu", (trainer._ranks.count,)))
with pytest.raises(ConfigurationError, match="a sharded model"):
    trainer.eject(folder / "none.py", **arguments)
# The file exists already, which one rank finds out for all.
trainer, arguments = run()
with pytest.raises(ConfigurationError, match="exists"):
    trainer.eject(folder / few[0] / "script.py", **arguments)
dist.barrier()
assert not (folder / "none.py").exists()
