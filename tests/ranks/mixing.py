"""Mixtures, batches by tokens and limits on two or three ranks, each resumed from some of its updates."""

import sys
from pathlib import Path

import torch

from tests.support.mixing import by_tokens, check_every_resume, check_on_ranks, counting, mixed

check_on_ranks()
for name, run in {"mixed": mixed, "by tokens": by_tokens, "counting": counting}.items():
    check_every_resume(run, Path(sys.argv[1]) / name, run(), between=4)
torch.distributed.destroy_process_group()
