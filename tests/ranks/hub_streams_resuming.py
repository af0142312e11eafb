"""Runs under torchrun on two ranks: runs over streams of `datasets`, resumed anywhere, equal the uninterrupted ones."""

import os
import sys
import warnings
from pathlib import Path

import torch
from datasets.distributed import split_dataset_by_node

from tests.data.hub import HUB_STREAMS, as_pairs
from tests.support.streaming import check_everywhere, stateful

folder = Path(sys.argv[1])
rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
assert ranks == 2
warnings.filterwarnings("ignore", message="'set_vital' is deprecated")
cut = {"train_dataloader_kwargs": {"collate_fn": as_pairs}}
sharded = {"train_dataloader_kwargs": {"collate_fn": as_pairs, "is_sharded": True}}


def check(name: str) -> None:
    stream = HUB_STREAMS[name]()  # the same for all runs: none must leave anything behind in it
    share = split_dataset_by_node(stream, rank, ranks)
    check_everywhere(lambda: stream, folder / name / "cut", num_epochs=2, **cut)
    check_everywhere(lambda: share, folder / name / "sharded", num_epochs=2, **sharded)
    check_everywhere(lambda: stateful(stream, collate_fn=as_pairs), folder / name / "stateful", num_epochs=2)


check("rows with noise")
check("a shuffle buffer with noise")
torch.distributed.destroy_process_group()
