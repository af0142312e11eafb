"""Features requested from accelerate are used, or there is an error."""

from typing import Any

import pytest

from tests.support.processes import run_on_ranks

SCRIPT = """
import os
import sys

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs, FullyShardedDataParallelPlugin
from torch import nn

from pytorch_accelerated import Trainer
from pytorch_accelerated.errors import ConfigurationError


def outcome(accumulation=1, environment=None, **arguments):
    before = dict(os.environ)
    os.environ.update(environment or {})
    try:
        model = nn.Linear(1, 1)
        trainer = Trainer(model, nn.MSELoss(), torch.optim.SGD(model.parameters()), callbacks=(), **arguments)
        assert trainer._ranks.count == int(os.environ["WORLD_SIZE"])
        trainer.train((torch.ones(8, 1), torch.ones(8, 1)), 1, None, 1, None, accumulation)
        print(f"trained: {trainer.run_state.updates} updates")
    except ConfigurationError as error:
        print(error)
    finally:
        os.environ.clear()
        os.environ.update(before)


def accelerator(**arguments):
    return lambda: Accelerator(cpu=True, **arguments)


def static(is_static):
    return accelerator(kwargs_handlers=[DistributedDataParallelKwargs(static_graph=is_static)])


outcome(environment={"ACCELERATE_USE_FSDP": "true"})
outcome(accelerator=accelerator(fsdp_plugin=FullyShardedDataParallelPlugin()))
outcome(environment={"ACCELERATE_USE_MEGATRON_LM": "true"}, accelerator=Accelerator(cpu=True))
outcome(environment={"ACCELERATE_MIXED_PRECISION": "fp8"})
outcome(mixed_precision="fp8")
outcome(accumulation=2, accelerator=static(False))
outcome(accelerator=static(True))
outcome(environment={"ACCELERATE_USE_PARALLELISM_CONFIG": "true", "PARALLELISM_CONFIG_TP_SIZE": "2"})
"""


@pytest.mark.processes
@pytest.mark.parametrize("ranks", [1, 2])
def test_features_that_accelerate_would_not_use_here_are_an_error(ranks: int) -> None:
    for told in run_on_ranks(SCRIPT, ranks).stdout_of_ranks:
        said: list[Any] = told.splitlines()
        assert "FSDP (ACCELERATE_USE_FSDP) is requested by an Accelerator" in said[0]
        assert "FSDP (ACCELERATE_USE_FSDP) is requested" in said[1]
        assert "MEGATRON_LM (ACCELERATE_USE_MEGATRON_LM) is requested" in said[2]
        assert "fp8" in said[3]
        assert "fp8" in said[4]
        assert said[5] == f"trained: {8 // 2 // ranks} updates"
        assert said[6] == f"trained: {8 // ranks} updates"
        assert "Tensor parallelism is requested (tp_size=2)" in said[7]
