"""Sharding a model over the ranks with torch's `fully_shard`, for `fsdp` of the Hugging Face trainer."""

from __future__ import annotations

import itertools
from collections.abc import Collection

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from pytorch_accelerated.errors import ConfigurationError
from pytorch_accelerated.ranks import Ranks


def shard(model: nn.Module, layers: list[nn.Module], ranks: Ranks, *, reshards: bool) -> None:
    """Shard `model` over the ranks in place, with the weights of rank 0 on the device. Must be called by all ranks.

    Args:
        model: all of its parameters are sharded.
        layers: those that are gathered one by one for their forward and backward; all others are gathered at once.
        ranks: of the run.
        reshards: whether a layer is sharded again after its forward.
    """
    with torch.no_grad():
        for tensor in itertools.chain(model.parameters(), model.buffers()):
            moved = tensor.to(ranks.device)
            ranks.copy_from_first([moved])
            tensor.copy_(moved)
    mesh = init_device_mesh(ranks.device.type, (ranks.count,))
    for layer in [*layers, model]:
        fully_shard(layer, mesh=mesh, reshard_after_forward=reshards)


def named_layers(model: nn.Module, given: str | Collection[str]) -> list[nn.Module]:
    """The layers of the given classes, inner ones first.

    Raises:
        ConfigurationError: if the model has none of one of them.
    """
    names = {given} if isinstance(given, str) else set(given)
    layers = layers_of(model, names)
    missing = names - {type(layer).__name__ for layer in layers}
    if missing:
        others = sorted({type(module).__name__ for module in model.modules() if module is not model})
        raise ConfigurationError(
            f"`transformer_layer_cls_to_wrap` names {', '.join(map(repr, sorted(missing)))}, but the "
            f"{type(model).__name__} has only {', '.join(others)}."
        )
    return layers


def layers_of(model: nn.Module, names: Collection[str]) -> list[nn.Module]:
    """The layers whose classes have one of these names, inner ones first."""
    inner_first = reversed(list(model.modules()))
    return [module for module in inner_first if module is not model and type(module).__name__ in names]
