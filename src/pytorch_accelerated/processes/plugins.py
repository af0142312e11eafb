"""Checks whether the plugins and parallelism requested from accelerate will have an effect.

accelerate silently drops what a device does not support: with the FSDP plugin, a machine without a GPU trains with DDP.
"""

from __future__ import annotations

import os
from typing import Any

from pytorch_accelerated.errors import ConfigurationError

# Set by `accelerate launch` from its command line or file, and by an `Accelerator` that is given the plugin.
_VARIABLES = {
    "FSDP": "ACCELERATE_USE_FSDP",
    "DEEPSPEED": "ACCELERATE_USE_DEEPSPEED",
    "MEGATRON_LM": "ACCELERATE_USE_MEGATRON_LM",
}
_PACKAGES_WITH_FP8 = ("transformer_engine", "intel_transformer_engine", "torchao")
_KINDS_OF_PARALLELISM = {"tp": "tensor", "cp": "context", "sp": "sequence"}


def check_plugins(accelerator: Any) -> None:
    """Reject an accelerator with a requested feature that it does not use on this device.

    Raises:
        ConfigurationError: names the feature, where it was requested, and what to do.
    """
    refuse_parallelism(getattr(accelerator, "parallelism_config", None))
    kind, device = str(accelerator.distributed_type.value), accelerator.device.type
    unused = [
        f"{plugin} ({name})" for plugin, name in _VARIABLES.items() if _is_set(name) and kind not in (plugin, "XLA")
    ]
    if accelerator.fp8_enabled and (str(accelerator.mixed_precision) != "fp8" or device == "cpu"):
        unused.append("the precision fp8")
    if unused:
        raise ConfigurationError(
            f"{', '.join(unused)} is requested by an Accelerator or by accelerate's configuration, but accelerate does "
            f"not use it here ({accelerator.num_processes} process(es) on {device}): the model would be trained "
            "without it. Start on devices that it supports, with a launcher, or remove it."
        )


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
