"""Checks whether the plugins and parallelism requested from accelerate will have an effect.

accelerate silently drops what a device does not support: with the FSDP plugin, a machine without a GPU trains with DDP.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from pytorch_accelerated.errors import ConfigurationError

# Set by `accelerate launch` from its command line or file, and by an `Accelerator` that is given the plugin.
_VARIABLES = {
    "FSDP": "ACCELERATE_USE_FSDP",
    "DEEPSPEED": "ACCELERATE_USE_DEEPSPEED",
    "MEGATRON_LM": "ACCELERATE_USE_MEGATRON_LM",
}
_NAMES = {"FSDP": "FSDP", "DEEPSPEED": "DeepSpeed", "MEGATRON_LM": "Megatron-LM"}
_PACKAGES_WITH_FP8 = ("transformer_engine", "intel_transformer_engine", "torchao")
_KINDS_OF_PARALLELISM = {"tp": "tensor", "cp": "context", "sp": "sequence"}


def check_plugins(accelerator: Any) -> None:
    """Reject an accelerator with a requested feature that it does not use on this device.

    Raises:
        ConfigurationError: names the feature, where it was requested, and what to do.
    """
    refuse_parallelism(getattr(accelerator, "parallelism_config", None))
    complaints = [*_complaints(accelerator)]
    if complaints:
        raise ConfigurationError(f"{'; '.join(complaints)}.")


def refuse_parallelism(config: Any = None) -> None:
    """Reject tensor, context and sequence parallelism.

    Args:
        config: accelerate's `ParallelismConfig`; if None, the variables from which accelerate would create one.

    Raises:
        ConfigurationError: if one of them is requested.
    """
    if config is None and not _is_set("ACCELERATE_USE_PARALLELISM_CONFIG"):
        return
    for short, name in _KINDS_OF_PARALLELISM.items():
        told = os.environ.get(f"PARALLELISM_CONFIG_{short.upper()}_SIZE", "1")
        size = int(told) if config is None else getattr(config, f"{short}_size", 1)
        if size > 1:
            raise ConfigurationError(
                f"{name.capitalize()} parallelism is requested ({short}_size={size}), but this trainer gives each "
                "process different batches, so the parts of a model would receive different data. Remove it, and use "
                "FSDP (torch's `fully_shard`) for a model that doesn't fit on one device."
            )


def _is_set(variable: str) -> bool:
    return os.environ.get(variable, "").lower() in ("1", "true")


def _complaints(accelerator: Any) -> Iterator[str]:
    kind, device = str(accelerator.distributed_type.value), accelerator.device.type
    for plugin, variable in _VARIABLES.items():
        if _is_set(variable) and kind not in (plugin, "XLA"):
            yield (
                f"{_NAMES[plugin]} is requested by an Accelerator or by accelerate's configuration ({variable}), but "
                f"accelerate does not use it here ({accelerator.num_processes} process(es) on {device}): the model "
                "would be trained without it. Start on devices that it supports, with a launcher, or remove the "
                "plugin"
            )
    config = getattr(accelerator, "parallelism_config", None)
    shards = getattr(config, "dp_shard_size", 1)
    if shards and shards > 1 and kind != "FSDP":
        yield (
            f"The model should be sharded over {shards} processes (dp_shard_size), but FSDP is not active here, so "
            "each process would hold the whole model. Pass an FSDP plugin as well, on devices that it supports"
        )
    used = str(accelerator.mixed_precision)
    if used != "fp8" and accelerator.fp8_enabled:
        yield f"The precision fp8 is requested, but accelerate uses {used} on this device. Choose 'bf16'"
    elif used == "fp8" and device == "cpu":
        yield "The precision fp8 is requested, but the CPU does not support it. Choose 'bf16' or 'no'"


def refuse_idle_fp8(accelerator: Any, model: Any) -> None:
    """Reject fp8 for a model that would compute nothing in it.

    A model that isn't sharded is left as it is: its layers are not replaced by those of torchao or Transformer Engine.

    Raises:
        ConfigurationError: if the model itself has no such layers.
    """
    if str(accelerator.mixed_precision) != "fp8":
        return
    packages = {type(module).__module__.partition(".")[0] for module in model.modules()}
    if packages.isdisjoint(_PACKAGES_WITH_FP8):
        raise ConfigurationError(
            "The precision is fp8, but no part of this model would be computed in it: the trainer replaces no layers, "
            "and the model has none of Transformer Engine or torchao. Build or convert the model with one of these "
            "before you pass it to the trainer, or choose 'bf16'."
        )


def refuse_static_graph(accelerator: Any, accumulation_steps: int) -> None:
    """Reject DDP's `static_graph` for updates of several batches.

    Raises:
        ConfigurationError: explains why the two can't be combined.
    """
    handler = getattr(accelerator, "ddp_handler", None)
    if accumulation_steps > 1 and accelerator.num_processes > 1 and getattr(handler, "static_graph", False):
        raise ConfigurationError(
            f"`static_graph` is set for DDP, and an update has {accumulation_steps} batches. With a static graph, "
            "torch expects every backward pass to be like the first one, but gradients are exchanged only in the "
            "last one of an update, so torch fails in the first update. Remove `static_graph` (`ddp_static_graph`), "
            "or set `gradient_accumulation_steps=1`."
        )
