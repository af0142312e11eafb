"""Arguments about devices, precision, seeds and multiple processes, translated for the native trainer.

Models are sharded with torch's `fully_shard`; `docs/design/sharded-models.md` says how the native loop trains them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DataParallel

from pytorch_accelerated.errors import ConfigurationError
from pytorch_accelerated.facts.optional import require
from pytorch_accelerated.facts.seeding import set_seed
from pytorch_accelerated.huggingface.arguments.fields import Arguments
from pytorch_accelerated.huggingface.knowledge import has_own_place
from pytorch_accelerated.huggingface.trainer_utils import enable_full_determinism, warn
from pytorch_accelerated.ranks.compat.extras import unsplittable_layers
from pytorch_accelerated.ranks.ranks import Ranks
from pytorch_accelerated.ranks.sharding import has_shards

if TYPE_CHECKING:
    from pytorch_accelerated.huggingface.hooks import TrainerHooks
    from pytorch_accelerated.huggingface.training_args import TrainingArguments

# Whether a layer is sharded again after its forward. "auto_wrap" changes nothing: layers are always wrapped.
_WORDS: dict[str, bool | None] = {"full_shard": True, "shard_grad_op": False, "auto_wrap": None}
_DDP_OPTIONS = ("ddp_find_unused_parameters", "ddp_bucket_cap_mb", "ddp_broadcast_buffers", "ddp_static_graph")
_FIRST = "make the arguments first"
_SETTINGS = ("transformer_layer_cls_to_wrap", "reshard_after_forward", "version")


def seed_run(args: TrainingArguments) -> None:
    """Seed all generators as the arguments say."""
    (enable_full_determinism if args.full_determinism else set_seed)(args.seed)


def native_arguments(args: TrainingArguments) -> dict[str, Any]:
    """The arguments with which the native trainer is made."""
    precision = "bf16" if args.bf16 else "fp16" if args.fp16 else None
    compiling = {"backend": args.torch_compile_backend, "mode": args.torch_compile_mode}
    given = {name: value for name, value in compiling.items() if value is not None}
    return {"mixed_precision": precision, "compile_model": args.torch_compile and (given or True)}


def accelerator_arguments(args: TrainingArguments, model: Any) -> dict[str, Any]:
    """The arguments of `create_accelerator`, except for the precision."""
    options = {name.removeprefix("ddp_"): getattr(args, name) for name in _DDP_OPTIONS}
    if args.ddp_find_unused_parameters is None:
        # DDP would mark parameters as ready twice if their gradients were recomputed.
        options["find_unused_parameters"] = not (args.gradient_checkpointing or _checkpoints_activations(model))
    return {
        "cpu": args.use_cpu,
        "timeout": args.ddp_timeout_delta,
        "ddp_options": {name: value for name, value in options.items() if value is not None},
        "deepspeed_plugin": args.deepspeed_plugin,
    }


def deepspeed() -> Any:
    """What knows DeepSpeed's config."""
    return require("pytorch_accelerated.extras.deepspeed.config", needed_by="`deepspeed`")


def refuse_processes(args: TrainingArguments) -> None:
    """Reject arguments that cannot work in this process or in its group.

    Raises:
        ConfigurationError: with all complaints.
    """
    dealing: Any = args.accelerator_config
    several, complaints = args.world_size > 1, []
    if args.fp16 and args.device.type == "cpu" and args.deepspeed is None:  # which says so itself
        complaints.append("`fp16` is True, but the device is the CPU: use `bf16`")
    if several and args.ddp_backend not in (None, in_use := dist.get_backend()):
        complaints.append(f"`ddp_backend` is {args.ddp_backend!r}, but the processes use {in_use} already: {_FIRST}")
    for name in ("split_batches", "dispatch_batches"):
        if several and getattr(dealing, name):
            complaints.append(f"`accelerator_config` has {name}: True, which is for one process: leave it out")
    steps = (dealing.gradient_accumulation_kwargs or {}).get("num_steps", args.gradient_accumulation_steps)
    if steps != args.gradient_accumulation_steps:
        complaints.append(f"`accelerator_config` has num_steps: {steps!r}: give `gradient_accumulation_steps`")
    if args.fsdp and not several:
        complaints.append(f"`fsdp` is {args.fsdp!r}, but there is one process: start several with torchrun")
    if args.auto_find_batch_size and several:
        complaints.append("`auto_find_batch_size` is for one process: set `per_device_train_batch_size`")
    if complaints:
        raise ConfigurationError(f"These arguments cannot work here: {'; '.join(complaints)}.")


def in_replicas(trainer: TrainerHooks, model: Any, count: int) -> Any:
    """`model` in `DataParallel` on `count` GPUs, or as its user has wrapped it, with the outputs that it has alone.

    On one GPU the model itself, unless its user has wrapped it.
    """
    if count > 1 and not isinstance(model, DataParallel):
        model = DataParallel(model, list(range(count)))
    if not isinstance(model, DataParallel):
        return model
    module = require("pytorch_accelerated.extras.huggingface.replicas", needed_by="`DataParallel`")
    is_own = isinstance(model, module.Replicas) and model.count_items == trainer.count_items
    return model if is_own else module.Replicas(model, trainer.count_items)


def choose_gpus(args: TrainingArguments, model: Any) -> None:
    """Note how many GPUs the process uses for `model`. With several, advise one process for each."""
    if has_own_place(model):  # on all that it needs
        vars(args)["_n_gpu"] = min(args.n_gpu, 1)
    if args.n_gpu > 1:
        warn(
            f"This process uses {args.n_gpu} devices by DataParallel. One process for each is faster: start them with "
            f"`torchrun --nproc-per-node {args.n_gpu} your_script.py`; or use one alone by CUDA_VISIBLE_DEVICES=0."
        )


def enable_gradient_checkpointing(model: Any, args: TrainingArguments) -> None:
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
            f"`gradient_checkpointing` needs a method `gradient_checkpointing_enable` of {type(model).__name__}."
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


# ------------------------------------------------------------------------------------------------------ sharded models


def check_fsdp(args: Arguments) -> Iterator[str]:
    """Yield complaints about `fsdp` and `fsdp_config`."""
    words = str(args.fsdp).split() if isinstance(args.fsdp, str) else []
    unknown = [word for word in words if word not in _WORDS]
    if unknown:
        yield f"`fsdp` is {args.fsdp!r}, but {unknown[0]!r} is unsupported: give True, or some of {', '.join(_WORDS)}"
    settings = _settings(args)
    unknown = [name for name in settings if name not in _SETTINGS]
    if unknown:
        yield f"`fsdp_config` has {unknown[0]!r}, but the supported settings are {', '.join(_SETTINGS)}"
    if settings.get("version", 2) != 2:
        yield f"`fsdp_config` has version {settings['version']!r}, but only FSDP 2 is supported"


def shard(model: nn.Module, args: Arguments, ranks: Ranks) -> None:
    """Shard `model` over the ranks in place, if the arguments say so. Must be called by all ranks.

    Raises:
        ConfigurationError: if the model has none of the layers that `fsdp_config` names.
    """
    if not args.fsdp or has_shards(model):
        return
    module = require("pytorch_accelerated.extras.huggingface.sharding", needed_by="`fsdp`")
    settings = _settings(args)
    given, reshards = settings.get("transformer_layer_cls_to_wrap"), settings.get("reshard_after_forward")
    if reshards is None:
        reshards = "shard_grad_op" not in str(args.fsdp).split()
    layers = module.named_layers(model, given) if given else module.layers_of(model, unsplittable_layers(model))
    module.shard(model, layers, ranks, reshards=bool(reshards))


def _settings(args: Arguments) -> dict[str, Any]:
    """The settings in `fsdp_config`, by their names without the prefix "fsdp_"."""
    given: Mapping[str, Any] = args.fsdp_config or {}  # type: ignore[assignment]  # a dict by now
    return {name.removeprefix("fsdp_"): value for name, value in given.items()}
