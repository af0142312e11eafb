"""What stands around a user's model, and the model inside."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from pytorch_accelerated.compat.torch import uncompiled


def innermost(model: Any) -> Any:
    """The user's own model inside of data-parallel and compilation wrappers."""
    while True:
        inner = model.module if isinstance(model, (DistributedDataParallel, DataParallel)) else uncompiled(model)
        if inner is model or not isinstance(inner, nn.Module):
            return model
        model = inner
