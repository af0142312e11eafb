"""Runs under torchrun: values of the Hugging Face arguments in each of several processes."""

import logging
import os
from pathlib import Path

import torch

from pytorch_accelerated.huggingface import TrainingArguments
from pytorch_accelerated.huggingface.arguments.strategies import ParallelMode

args = TrainingArguments(use_cpu=True, ddp_timeout=60, log_level="info", log_level_replica="error")
rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
assert world_size > 1
assert (args.world_size, args.process_index, args.local_process_index) == (world_size, rank, rank)
assert (args.device.type, args.n_gpu, args.parallel_mode) == ("cpu", 0, ParallelMode.DISTRIBUTED)
assert args.should_save == args.should_log == (rank == 0)
assert args.get_process_log_level() == (logging.INFO if rank == 0 else logging.ERROR)
assert torch.distributed.get_backend() == "gloo"

# Whoever comes second finds what the first one has made.
made = Path("made")
with args.main_process_first():
    assert made.exists() == (rank > 0)
    made.touch()
torch.distributed.destroy_process_group()
