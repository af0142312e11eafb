"""Sharded models: the arguments `fsdp` and `fsdp_config`, applied with torch's `fully_shard`.

`docs/design/sharded-models.md` says how the native loop trains such a model.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from pytorch_accelerated.compat.transformers import unsplittable_layers
from pytorch_accelerated.errors import ConfigurationError
from pytorch_accelerated.huggingface.arguments.fields import Arguments
from pytorch_accelerated.models.sharding import has_shards
from pytorch_accelerated.processes.ranks import Ranks

# Whether a layer is sharded again after its forward. "auto_wrap" changes nothing: layers are always wrapped.
_WORDS: dict[str, bool | None] = {"full_shard": True, "shard_grad_op": False, "auto_wrap": None}
_SETTINGS = ("transformer_layer_cls_to_wrap", "min_num_params", "reshard_after_forward", "version")


def check_fsdp(args: Arguments) -> Iterator[str]:
    """Yield complaints about `fsdp` and `fsdp_config`."""
    words = str(args.fsdp).split() if isinstance(args.fsdp, str) else []
    unknown = [word for word in words if word not in _WORDS]
    if unknown:
        yield (
            f"`fsdp` is {args.fsdp!r}, but {', '.join(map(repr, unknown))} is unsupported: give True, or some of "
            f"{', '.join(_WORDS)}"
        )
    settings = _settings(args)
    unknown = [name for name in settings if name not in _SETTINGS]
    if unknown:
        yield (
            f"`fsdp_config` has {', '.join(map(repr, unknown))}, but the supported settings are "
            f"{', '.join(_SETTINGS)}: leave out others, which belong to FSDP 1 or follow from other arguments"
        )
    if settings.get("version", 2) != 2:
        yield f"`fsdp_config` has version {settings['version']!r}, but models are sharded by FSDP 2: leave it out"
    least = settings.get("min_num_params", 0)
    if not isinstance(least, int) or least < 0:
        yield f"`min_num_params` in `fsdp_config` is {least!r}: give a whole number from 0 on"
    if least and settings.get("transformer_layer_cls_to_wrap"):
        yield (
            "`fsdp_config` has both min_num_params and transformer_layer_cls_to_wrap, but the layers follow from "
            "one of them: choose one"
        )


def shard(model: nn.Module, args: Arguments, ranks: Ranks) -> None:
    """Shard `model` over the ranks in place, as the arguments say, with the weights of rank 0 on the device.

    Some layers are gathered one by one for their forward and backward: those of the classes named in `fsdp_config`, or
    those with at least `min_num_params` parameters, or those that a model of transformers names itself. All others are
    gathered at once. Must be called by all ranks.

    Raises:
        ConfigurationError: if the model has none of the layers.
    """
    if not args.fsdp or has_shards(model):
        return
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    layers = _layers(model, _settings(args))
    with torch.no_grad():
        for tensor in itertools.chain(model.parameters(), model.buffers()):
            moved = tensor.to(ranks.device)
            ranks.copy_from_first([moved])
            tensor.copy_(moved)
    mesh = init_device_mesh(ranks.device.type, (ranks.count,))
    for layer in [*layers, model]:
        fully_shard(layer, mesh=mesh, reshard_after_forward=_reshards(args))


def _reshards(args: Arguments) -> bool:
    given = _settings(args).get("reshard_after_forward")
    if given is not None:
        return bool(given)
    return not (isinstance(args.fsdp, str) and "shard_grad_op" in args.fsdp.split())


def _settings(args: Arguments) -> dict[str, Any]:
    """The settings in `fsdp_config`, by their names without the prefix "fsdp_"."""
    given: Mapping[str, Any] = args.fsdp_config or {}  # type: ignore[assignment]  # a dict by now
    return {name.removeprefix("fsdp_"): value for name, value in given.items()}


def _layers(model: nn.Module, settings: Mapping[str, Any]) -> list[nn.Module]:
    """The layers that are sharded separately, inner ones first."""
    inner_first = [module for module in reversed(list(model.modules())) if module is not model]
    least = settings.get("min_num_params")
    if least:
        return _large_layers(inner_first, least)
    given = settings.get("transformer_layer_cls_to_wrap")
    names = {given} if isinstance(given, str) else set(given or unsplittable_layers(model))
    layers = [module for module in inner_first if type(module).__name__ in names]
    missing = names - {type(layer).__name__ for layer in layers}
    if given and missing:
        raise ConfigurationError(
            f"`fsdp_config` names layers of the class {', '.join(map(repr, sorted(missing)))}, but the model, a "
            f"{type(model).__name__}, has none. It has {', '.join(sorted({type(one).__name__ for one in inner_first}))}"
            ": name some of these in `transformer_layer_cls_to_wrap`."
        )
    return layers


def _large_layers(inner_first: list[nn.Module], least: int) -> list[nn.Module]:
    taken: set[nn.Parameter] = set()
    layers = []
    for module in inner_first:
        own = set(module.parameters()) - taken
        # A list of modules has no forward during which it could be gathered.
        if sum(one.numel() for one in own) >= least and not isinstance(module, (nn.ModuleList, nn.ModuleDict)):
            layers.append(module)
            taken |= own
    return layers
