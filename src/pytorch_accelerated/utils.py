"""Public helpers, gathered from the modules that define them."""

from pytorch_accelerated.checkpointing.policy import read_run_history
from pytorch_accelerated.data.building import LIMIT_BATCHES_ENV_VAR, DataLoaderSlice, LimitBatches
from pytorch_accelerated.models.averaging import ModelEma
from pytorch_accelerated.prediction.padded import remove_padding
from pytorch_accelerated.processes.accelerators import (
    local_process_zero_first,
    local_process_zero_only,
    world_process_zero_only,
)
from pytorch_accelerated.seeding import set_seed, worker_init_fn

__all__ = [
    "LIMIT_BATCHES_ENV_VAR",
    "DataLoaderSlice",
    "LimitBatches",
    "ModelEma",
    "local_process_zero_first",
    "local_process_zero_only",
    "read_run_history",
    "remove_padding",
    "set_seed",
    "worker_init_fn",
    "world_process_zero_only",
]
