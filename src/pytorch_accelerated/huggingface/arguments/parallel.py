"""Arguments about devices, precision, compilation and several processes, translated for the native trainer."""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.distributed as dist

from pytorch_accelerated.callbacks.warning import stacklevel_of_user
from pytorch_accelerated.errors import ConfigurationError
from pytorch_accelerated.huggingface.arguments.deepspeed import DDP_OPTIONS, check_batches, engine_config
from pytorch_accelerated.huggingface.arguments.derived import DerivedValues
from pytorch_accelerated.processes.accelerators import uses_deepspeed


def native_arguments(args: DerivedValues) -> dict[str, Any]:
    """The arguments with which the native trainer is made."""
    precision = "bf16" if args.bf16 else "fp16" if args.fp16 else None
    compiling = {"backend": args.torch_compile_backend, "mode": args.torch_compile_mode}
    given = {name: value for name, value in compiling.items() if value is not None}
    return {
        "mixed_precision": precision if args.deepspeed is None else "no",  # DeepSpeed's config has the precision
        "compile_model": args.torch_compile and (given or True),
    }


def accelerator_arguments(args: DerivedValues, model: Any) -> dict[str, Any]:
    """The arguments of `create_accelerator`, except for the precision."""
    options = {name.removeprefix("ddp_"): getattr(args, name) for name in DDP_OPTIONS}
    if args.ddp_find_unused_parameters is None:
        # DDP would mark parameters as ready twice if their gradients were recomputed.
        options["find_unused_parameters"] = not (args.gradient_checkpointing or _checkpoints_activations(model))
    return {
        "cpu": args.use_cpu,
        "timeout": args.ddp_timeout_delta,
        "ddp_options": {name: value for name, value in options.items() if value is not None},
        "deepspeed_config": engine_config(args, model),
    }


def refuse_processes(args: DerivedValues) -> None:
    """Reject arguments that cannot work in this process or in its group.

    Raises:
        ConfigurationError: with all complaints.
    """
    device, complaints = args.device.type, []
    if args.use_cpu and device != "cpu":
        complaints.append(
            f"`use_cpu` is True, but this process has used {device} since it was first asked for its device: make the "
            "arguments before anything else"
        )
    if args.fp16 and device == "cpu":
        complaints.append("`fp16` is True, but the device is the CPU, which has no float16 training: use `bf16`")
    if args.world_size > 1 and args.ddp_backend not in (None, in_use := dist.get_backend()):
        complaints.append(
            f"`ddp_backend` is {args.ddp_backend!r}, but the processes have used {in_use} since the first of them was "
            "asked for its rank: make the arguments before anything else, or leave it out"
        )
    if (args.deepspeed is not None) != uses_deepspeed(args.distributed_state):
        complaints.append(
            f"`deepspeed` is {args.deepspeed!r}, but this process was set up {'without' if args.deepspeed else 'for'} "
            "it, by accelerate's configuration or when it was first asked for its rank: make the arguments before "
            "anything else, and don't mix both kinds in one process"
        )
    complaints += check_batches(args)
    if args.fsdp and args.world_size == 1:
        complaints.append(
            f"`fsdp` is {args.fsdp!r}, but there is one process, so there is nothing to shard: start several with "
            "torchrun, or leave it out"
        )
    if args.auto_find_batch_size and args.world_size > 1:
        complaints.append(
            f"`auto_find_batch_size` is True, but there are {args.world_size} processes, and while one of them "
            "restarts, the others would wait for its gradients: set `per_device_train_batch_size`"
        )
    if complaints:
        raise ConfigurationError(f"These arguments cannot work here: {'; '.join(complaints)}.")


def warn_about_idle_devices(args: DerivedValues) -> None:
    """Warn a process that sees several devices but uses only one of them."""
    if args.world_size == 1 and args.device.type != "cpu" and (count := torch.accelerator.device_count()) > 1:
        warnings.warn(
            f"This process sees {count} devices and uses one of them, {args.device}. To use all, start it with: "
            f"torchrun --nproc-per-node {count} your_script.py; to use this one alone, hide the others, for example "
            "with CUDA_VISIBLE_DEVICES=0.",
            stacklevel=stacklevel_of_user(),
        )


def enable_gradient_checkpointing(model: Any, args: DerivedValues) -> None:
    """Have the model recompute activations instead of keeping them, if the arguments say so.

    A recomputed layer may get no gradient if nothing before it is trained, so a model with frozen parameters is asked
    to require gradients of its inputs, if it can.

    Raises:
        ConfigurationError: if the model cannot recompute activations.
    """
    if not args.gradient_checkpointing:
        return
    name = _known_name(model, "{}_checkpointing_enable")
    if name is None:
        raise ConfigurationError(
            f"`gradient_checkpointing` is True, but {type(model).__name__} has no method "
            "`gradient_checkpointing_enable`, as models of transformers have. Write one, or call "
            "`torch.utils.checkpoint.checkpoint` in its forward and leave the argument out."
        )
    getattr(model, name)(args.gradient_checkpointing_kwargs)
    is_partly_frozen = not all(parameter.requires_grad for parameter in model.parameters())
    if is_partly_frozen and hasattr(model, "enable_input_require_grads"):
        model.enable_input_require_grads()


def _checkpoints_activations(model: Any) -> bool:
    name = _known_name(model, "is_{}_checkpointing")
    return name is not None and bool(getattr(model, name))


def _known_name(model: Any, pattern: str) -> str | None:
    """The newer or the older name of an attribute of the model. If it has both, the older one would warn.

    The model itself is asked, not its class, because wrappers such as PEFT's delegate to the model inside.
    """
    names = (pattern.format(word) for word in ("activation", "gradient"))
    return next((name for name in names if hasattr(model, name)), None)
