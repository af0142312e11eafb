"""The same numbers at every run, also where the fastest algorithm would not give them."""

from __future__ import annotations

import os

import torch

from pytorch_accelerated.seeding import set_seed


def enable_full_determinism(seed: int, warn_only: bool = False) -> None:
    """Seed all generators and have torch use deterministic algorithms only, for the rest of this process.

    Call it before the first CUDA operation, because cuBLAS reads its workspace setting then.

    Args:
        seed: see `set_seed`.
        warn_only: warn about an operation that has no deterministic algorithm, where torch would raise an error.
    """
    set_seed(seed)
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":16:8"
    torch.use_deterministic_algorithms(True, warn_only=warn_only)
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False
