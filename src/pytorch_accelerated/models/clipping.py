"""Clips gradients by their common norm."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pytorch_accelerated.compat.torch import norms_of, scale_all
from pytorch_accelerated.models.sharding import whole


def clip_norm(parameters: Sequence[torch.Tensor], most: float) -> torch.Tensor:
    """Scale the gradients of `parameters` so that their common norm is at most `most`. Returns the norm before.

    Does not wait for the device. Must be called by all ranks, because sharded gradients have one norm.

    Equals torch's ``clip_grad_norm_`` to the bit. If all gradients are plain tensors of one device and type, it takes a
    third of the time for small models: torch sorts the gradients by both, twice.
    """
    norm: torch.Tensor
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    kinds = {(type(each), each.device, each.dtype, each.requires_grad) for each in gradients}
    if len(kinds) != 1 or type(gradients[0]) is not torch.Tensor or gradients[0].requires_grad:
        norm = torch.nn.utils.clip_grad_norm_(parameters, most)
        return whole(norm)  # type: ignore[no-any-return]
    norm = torch.linalg.vector_norm(torch.stack(norms_of(gradients)))
    scale_all(gradients, norm.add(1e-6).reciprocal_().mul_(most).clamp_(max=1.0))
    return norm
