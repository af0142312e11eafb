"""The `Accelerator` of a process: making one, and checking one that the user has made.

accelerate silently drops what a device does not support: with the FSDP plugin, a machine without a GPU trains with DDP.
So what was requested is compared with what is in force.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist
from accelerate import Accelerator as Accelerator
from accelerate import PartialState
from accelerate.utils import (
    DistributedDataParallelKwargs,
    DistributedType,
    GradientAccumulationPlugin,
    InitProcessGroupKwargs,
    is_fp8_available,
)
from accelerate.utils import send_to_device as send_to_device

from pytorch_accelerated.errors import ArgumentTypeError, ConfigurationError
from pytorch_accelerated.facts.optional import require
from pytorch_accelerated.ranks.compat.accelerate import (
    forget_other_precision,
    forget_settings,
    has_process_state,
    remember_settings,
)
from pytorch_accelerated.ranks.launching import World, check_group, join_world, meeting, must_group_on_cpu

Function = TypeVar("Function", bound=Callable[..., Any])

_PRECISIONS = ("no", "fp16", "bf16", "fp8")
# Set by `accelerate launch` from its command line or file, and by an `Accelerator` that is given the plugin.
_VARIABLES = {
    "FSDP": "ACCELERATE_USE_FSDP",
    "DEEPSPEED": "ACCELERATE_USE_DEEPSPEED",
    "MEGATRON_LM": "ACCELERATE_USE_MEGATRON_LM",
}
_PACKAGES_WITH_FP8 = ("transformer_engine", "intel_transformer_engine", "torchao")
_KINDS_OF_PARALLELISM = {"tp": "tensor", "cp": "context", "sp": "sequence"}


def create_accelerator(
    mixed_precision: str | None = None,
    *,
    cpu: bool = False,
    timeout: timedelta | None = None,
    ddp_options: Mapping[str, Any] | None = None,
    deepspeed_plugin: Any = None,
) -> Accelerator:
    """An `Accelerator` for this process, in the group of processes that the launcher asked for.

    Args:
        mixed_precision: see `Trainer`.
        cpu: True to use the CPU, whatever else there is.
        timeout: how long a process waits for the others; default: torch's.
        ddp_options: for torch's `DistributedDataParallel`; they override ours.
        deepspeed_plugin: accelerate's `DeepSpeedPlugin`. Default: what accelerate's configuration asks for, if it does.

    Raises:
        ConfigurationError: if the precision is unknown, or if it or a plugin of accelerate would have no effect on this
            device.
        LaunchError: if the launcher asked for multiple processes, but they would not train together.
    """
    if mixed_precision is not None and str(mixed_precision) not in _PRECISIONS:
        raise ConfigurationError(
            f"`mixed_precision` is {mixed_precision!r}. Choose 'no', 'fp16', 'bf16' or 'fp8', or None for accelerate's."
        )
    if (mixed_precision or os.environ.get("ACCELERATE_MIXED_PRECISION")) == "fp8" and not is_fp8_available():
        raise ConfigurationError(
            "The precision is fp8, by `mixed_precision` or by accelerate's configuration, but neither Transformer "
            "Engine nor torchao is installed, which compute in it. Install one of them, or use 'bf16'."
        )
    refuse_parallelism()
    forget_other_precision(mixed_precision)
    world = join_world()
    has_deepspeed = deepspeed_plugin is not None or _is_set(_VARIABLES["DEEPSPEED"])
    starting: Any = contextlib.nullcontext(None)
    if has_deepspeed:
        module = require("pytorch_accelerated.extras.deepspeed.config", needed_by="DeepSpeed")
        options: dict[str, Any] = {} if timeout is None else {"timeout": timeout}
        process_state(**options)
        forget_settings()
        starting = module.starting(deepspeed_plugin)
    with meeting(world), starting as plugin:
        accelerator = Accelerator(
            mixed_precision=mixed_precision,
            cpu=not has_deepspeed and (cpu or must_group_on_cpu(world)),
            deepspeed_plugin=plugin,
            # The plugin, not the number: the number can be overruled by an environment variable.
            gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=1),
            step_scheduler_with_optimizer=False,
            kwargs_handlers=[
                # Gradients live in the buckets that are sent, which saves a copy of them.
                DistributedDataParallelKwargs(**{"gradient_as_bucket_view": True, **(ddp_options or {})}),
                *([] if timeout is None else [InitProcessGroupKwargs(timeout=timeout)]),
            ],
        )
    remember_settings(accelerator, trainer_asked=mixed_precision is not None or has_deepspeed)
    return _checked(accelerator, world, timeout)


def given_accelerator(given: Any, timeout: timedelta | None = None) -> Accelerator:
    """The user's own `Accelerator`, checked.

    Args:
        given: the `Accelerator`, or a function that returns one.
        timeout: how long a process waits for the others.

    Raises:
        ArgumentTypeError: if `given` is neither.
        ConfigurationError: if the Accelerator accumulates gradients itself, or has a precision or a plugin that would
            have no effect on its device.
        LaunchError: if multiple processes should train together, but this Accelerator is on its own.
    """
    world = join_world()
    if must_group_on_cpu(world):
        process_state()  # an Accelerator that is made from now on is part of it
    accelerator = given() if callable(given) and not isinstance(given, Accelerator) else given
    if not isinstance(accelerator, Accelerator):
        raise ArgumentTypeError(
            f"`accelerator` is {given!r}: pass an `accelerate.Accelerator`, or a function that returns one."
        )
    has_deepspeed = accelerator.distributed_type == DistributedType.DEEPSPEED  # whose config is checked with the run
    if accelerator.gradient_accumulation_steps != 1 and not has_deepspeed:
        raise ConfigurationError(
            f"The accelerator has gradient_accumulation_steps={accelerator.gradient_accumulation_steps}, but this "
            "trainer accumulates by itself. Leave it at 1, and pass `gradient_accumulation_steps` to `train`."
        )
    return _checked(accelerator, world, timeout)


def _checked(accelerator: Accelerator, world: World | None, timeout: timedelta | None) -> Accelerator:
    check_group(accelerator, world)
    group: Any = dist.group.WORLD if dist.is_initialized() else None
    if timeout is not None and group is not None:  # an accelerator or an earlier run may have made it
        group.set_timeout(timeout)
    check_plugins(accelerator)
    silently = accelerator.distributed_type != DistributedType.DEEPSPEED
    if silently and accelerator.mixed_precision == "fp16" and accelerator.device.type == "cpu":
        raise ConfigurationError(
            "The precision is fp16, by `mixed_precision` or by accelerate's configuration, but the device is the CPU, "
            "where accelerate would silently train without it. Use 'bf16' or 'no'."
        )
    return accelerator


def process_state(*, cpu: bool = False, **group_options: Any) -> PartialState:
    """accelerate's state of this process. It works before there is a trainer; the first call decides for all.

    Args:
        cpu: True to use the CPU, whatever else there is.
        group_options: for torch's `init_process_group`, if this makes the group of all processes.
    """
    if has_process_state():
        return PartialState()
    world = join_world()
    with meeting(world):
        return PartialState(cpu=cpu or must_group_on_cpu(world), **group_options)


def local_process_zero_only(function: Function) -> Function:
    """Decorate `function` to run on the first process of each node only; the others get None at once."""
    return _only(function, "is_local_main_process")


def world_process_zero_only(function: Function) -> Function:
    """Decorate `function` to run on the first of all processes only; the others get None at once."""
    return _only(function, "is_main_process")


def _only(function: Function, condition: str) -> Function:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs) if getattr(process_state(), condition) else None

    return wrapper  # type: ignore[return-value]


def local_process_zero_first(function: Function) -> Function:
    """Decorate `function` to run on the first process of each node, then on its others. All processes must call it.

    For things that one process prepares and the others then find ready, such as a download.
    """

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        with process_state().local_main_process_first():
            return function(*args, **kwargs)

    return wrapper  # type: ignore[return-value]


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
            f"not use it here ({accelerator.num_processes} process(es) on {device}). Use a launcher without "
            "ACCELERATE_USE_CPU, or remove it."
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
                "process different batches. Remove it; FSDP (torch's `fully_shard`) divides large models."
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
            "The precision is fp8, but no part of this model would be computed in it: it has no layers of Transformer "
            "Engine or torchao. Convert the model with one of these before you pass it to the trainer, or use 'bf16'."
        )
