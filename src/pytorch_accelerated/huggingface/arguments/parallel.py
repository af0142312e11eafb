"""What the arguments say about devices, precision, compilation and several processes, for the native trainer."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from pytorch_accelerated.callbacks.warning import stacklevel_of_user
from pytorch_accelerated.errors import ConfigurationError
from pytorch_accelerated.huggingface.arguments.deepspeed import check_batches, engine_config
from pytorch_accelerated.processes.accelerators import uses_deepspeed

if TYPE_CHECKING:
    from pytorch_accelerated.huggingface.arguments.training_arguments import TrainingArguments


def native_arguments(args: TrainingArguments) -> dict[str, Any]:
    """What the native trainer is made with."""
    precision = "bf16" if args.bf16 else "fp16" if args.fp16 else None
    return {
        "mixed_precision": precision if args.deepspeed is None else "no",  # DeepSpeed's config says it
        "compile_model": compile_arguments(args),
    }


def compile_arguments(args: TrainingArguments) -> bool | dict[str, Any]:
    """What the native trainer is told about compilation."""
    if not args.torch_compile:
        return False
    given = {"backend": args.torch_compile_backend, "mode": args.torch_compile_mode}
    return {name: value for name, value in given.items() if value is not None} or True


def accelerator_arguments(args: TrainingArguments, model: Any) -> dict[str, Any]:
    """What `create_accelerator` is called with, besides the precision."""
    looks_for_unused = args.ddp_find_unused_parameters
    if looks_for_unused is None:
        # What is computed twice would be marked as ready twice.
        looks_for_unused = not (args.gradient_checkpointing or _checkpoints_activations(model))
    options = {
        "find_unused_parameters": looks_for_unused,
        "bucket_cap_mb": args.ddp_bucket_cap_mb,
        "broadcast_buffers": args.ddp_broadcast_buffers,
        "static_graph": args.ddp_static_graph,
    }
    return {
        "cpu": args.use_cpu,
        "timeout": args.ddp_timeout_delta,
        "ddp_options": {name: value for name, value in options.items() if value is not None},
        "deepspeed_config": engine_config(args, model),
    }


def refuse_processes(args: TrainingArguments) -> None:
    """Refuse arguments that this process, or the group that it belongs to, cannot follow. All in one error.

    Raises:
        ConfigurationError: names them.
    """
    device, complaints = args.device.type, []
    if args.use_cpu and device != "cpu":
        complaints.append(
            f"`use_cpu` is True, but this process uses {device} since it was first asked for its device: make the "
            "arguments before anything else"
        )
    if args.fp16 and device == "cpu":
        complaints.append("`fp16` is True, but the device is the CPU, which has no float16 training: use `bf16`")
    if args.world_size > 1 and args.ddp_backend not in (None, talks_through := dist.get_backend()):
        complaints.append(
            f"`ddp_backend` is {args.ddp_backend!r}, but the processes talk through {talks_through} since the first "
            "of them was asked for its place: make the arguments before anything else, or leave it out"
        )
    if (args.deepspeed is not None) != uses_deepspeed(args.distributed_state):
        complaints.append(
            f"`deepspeed` is {args.deepspeed!r}, but this process was set up {'without' if args.deepspeed else 'for'} "
            "it, by accelerate's configuration or when it was first asked for its place: make the arguments before "
            "anything else, and one kind of them in a process"
        )
    complaints += check_batches(args)
    if args.fsdp and args.world_size == 1:
        complaints.append(
            f"`fsdp` is {args.fsdp!r}, but there is one process, so nothing could be shared out: start several with "
            "torchrun, or leave it out"
        )
    if args.auto_find_batch_size and args.world_size > 1:
        complaints.append(
            f"`auto_find_batch_size` is True, but there are {args.world_size} processes: while one of them begins "
            "again, the others would wait for its gradients: set `per_device_train_batch_size`"
        )
    if complaints:
        raise ConfigurationError(f"These arguments cannot work here: {'; '.join(complaints)}.")


def warn_about_idle_devices(args: TrainingArguments) -> None:
    """One warning where this process sees several devices, of which it uses one."""
    if args.world_size == 1 and args.device.type != "cpu" and (count := torch.accelerator.device_count()) > 1:
        warnings.warn(
            f"This process sees {count} devices and uses one of them, {args.device}. To use all, start it with: "
            f"torchrun --nproc-per-node {count} your_script.py; to use this one alone, hide the others, for example "
            "with CUDA_VISIBLE_DEVICES=0.",
            stacklevel=stacklevel_of_user(),
        )


def enable_gradient_checkpointing(model: Any, args: TrainingArguments) -> None:
    """Have the model compute activations twice instead of keeping them, if the arguments say so.

    What is computed twice may get no gradient where nothing before it is trained, so the inputs of a model with frozen
    parameters are made to need one, if the model can do that.

    Raises:
        ConfigurationError: if it cannot do so.
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
    """The name that a model has for something; the newer one, because the older one warns where there are both.

    The model itself is asked, not its class: wrappers, as those of PEFT, hand on what the model in them has.
    """
    names = (pattern.format(word) for word in ("activation", "gradient"))
    return next((name for name in names if hasattr(model, name)), None)
