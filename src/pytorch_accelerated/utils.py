"""Public helpers, gathered from the modules that define them."""

from pytorch_accelerated.data.building import LIMIT_BATCHES_ENV_VAR, DataLoaderSlice, LimitBatches
from pytorch_accelerated.facts.seeding import set_seed, worker_init_fn
from pytorch_accelerated.prediction.padded import remove_padding
from pytorch_accelerated.ranks.accelerators import (
    local_process_zero_first,
    local_process_zero_only,
    world_process_zero_only,
)
from pytorch_accelerated.ranks.averaging import ModelEma
from pytorch_accelerated.states.policy import read_run_history

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
