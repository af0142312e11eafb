"""What stands around a user's model, and the model inside."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from pytorch_accelerated.compat.torch import uncompiled

if TYPE_CHECKING:
    from typing import TypeGuard


def innermost(model: Any) -> Any:
    """The user's own model inside of data-parallel and compilation wrappers."""
    while True:
        inner = model.module if isinstance(model, (DistributedDataParallel, DataParallel)) else uncompiled(model)
        if inner is model or not isinstance(inner, nn.Module):
            return model
        model = inner


def bare_model(model: Any) -> Any:
    """The module inside of what training wraps around it."""
    while isinstance(model, DistributedDataParallel) or is_engine(model):
        model = model.module
    return model


def for_evaluation(model: Any) -> Any:
    """The model without a wrapper that would wait for ranks that have no batch."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def is_engine(model: Any) -> TypeGuard[nn.Module]:
    """Whether `model` is a DeepSpeed engine."""
    deepspeed = sys.modules.get("deepspeed")  # such a model exists only if deepspeed has been imported
    return deepspeed is not None and isinstance(model, deepspeed.DeepSpeedEngine)
