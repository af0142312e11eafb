"""The config of the argument `deepspeed`: its checks, and the values that its "auto" stands for.

`docs/design/sharded-models.md` says how it is used.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from pytorch_accelerated.errors import ConfigurationError
from pytorch_accelerated.huggingface.arguments.fields import Arguments, OptimizerNames, SchedulerType
from pytorch_accelerated.optional import require

if TYPE_CHECKING:
    from pytorch_accelerated.huggingface.training_args import TrainingArguments

AUTO = "auto"

# By path: settings whose effect could not be saved and resumed, and their harmless values.
_NOT_KEPT: dict[str, tuple[Any, ...]] = {
    "fp16.enabled": (False, AUTO),
    "zero_optimization.offload_optimizer.device": ("none",),
    "zero_optimization.offload_param.device": ("none",),
    "zero_optimization.round_robin_gradients": (False,),
}
_OF_THIRD_STAGE = "stage3_"  # settings that the other stages ignore
_STAGES = (0, 1, 2)
_SCHEDULES = {
    "WarmupLR": SchedulerType.CONSTANT_WITH_WARMUP,
    "WarmupDecayLR": SchedulerType.LINEAR,
    "WarmupCosineLR": SchedulerType.COSINE,
}
_OPTIMIZERS = (OptimizerNames.ADAMW_TORCH, OptimizerNames.ADAMW_TORCH_FUSED)
# Arguments of DistributedDataParallel, which DeepSpeed replaces.
DDP_OPTIONS = ("ddp_find_unused_parameters", "ddp_bucket_cap_mb", "ddp_broadcast_buffers", "ddp_static_graph")


def check_deepspeed(args: Arguments) -> Iterator[str]:
    """Yield complaints about `deepspeed`, alone or together with other arguments."""
    config: Any = args.deepspeed
    if config is None:
        return
    sections = ("fp16", "bf16", "optimizer", "scheduler", "zero_optimization")
    wrong = [f"{name}: {config[name]!r}" for name in sections if not isinstance(config.get(name, {}), Mapping)]
    if wrong:
        yield f"`deepspeed` has {' and '.join(wrong)}: give a dict for each"
        return
    yield from _about_settings(config)
    yield from _about_other_arguments(args, config)
    yield from _contradictions(config, _values_of_arguments(args))


def check_batches(args: TrainingArguments) -> Iterator[str]:
    """Yield complaints about `deepspeed` with this number of processes."""
    yield from _contradictions(args.deepspeed, _values_of_processes(args))


def check_parts(args: Arguments, *, has_optimizer: bool, has_scheduler: bool) -> Iterator[str]:
    """Yield complaints about `deepspeed` together with the parts that the Trainer is given."""
    for section, is_given in (("optimizer", has_optimizer), ("scheduler", has_scheduler)):
        if is_given and section in (args.deepspeed or {}):
            yield f"`deepspeed` has a section {section!r}, and the Trainer is given one: leave one out"


def filled_config(args: TrainingArguments, model: Any, num_training_steps: int | None = None) -> dict[str, Any]:
    """Replace each "auto" in the config as transformers does.

    Args:
        args: the source of most values.
        model: its config has the hidden size, from which sizes of ZeRO follow.
        num_training_steps: updates of the run; None leaves "auto" where a value depends on them.

    Raises:
        ConfigurationError: if a value is unknown.
    """
    config: dict[str, Any] = copy.deepcopy(args.deepspeed)  # type: ignore[arg-type]  # a dict by now
    values = {**_values_of_arguments(args), **_values_of_processes(args), **_values_of_model(model, config)}
    if num_training_steps is not None:
        values.update(_values_of_length(args, num_training_steps))
    for path, (value, _) in values.items():
        if _found(config, path) == AUTO:
            section, _, name = path.rpartition(".")
            _found(config, section)[name] = value
    return config


def engine_config(args: TrainingArguments, model: Any) -> dict[str, Any] | None:
    """Make the config for DeepSpeed's engine; None without `deepspeed`.

    The loop accumulates, makes optimizer and schedule, and uses torch's mixed precision for bfloat16.

    Raises:
        ConfigurationError: if a value is unknown.
    """
    if args.deepspeed is None:
        return None
    filled = filled_config(args, model)
    of_loop = ("train_batch_size", "optimizer", "scheduler", "fp16", "bf16")
    config = {name: value for name, value in filled.items() if name not in of_loop}
    zero = config["zero_optimization"] = {
        name: value
        for name, value in filled.get("zero_optimization", {}).items()
        if not name.startswith(("offload_", _OF_THIRD_STAGE))
    }
    left = [name for name, value in {**config, **zero}.items() if value == AUTO]
    if left:
        raise ConfigurationError(f"`deepspeed` has {AUTO!r} for {', '.join(left)}, which follows from no argument.")
    config["train_micro_batch_size_per_gpu"] = args.per_device_train_batch_size
    config["gradient_accumulation_steps"] = 1
    # Without ZeRO the loop finds whole gradients, and clips them itself.
    config["gradient_clipping"] = args.max_grad_norm or 0.0 if zero.get("stage", 0) else 0.0
    config.setdefault("zero_allow_untested_optimizer", True)
    # An empty list of modules: the gradients of others aren't exchanged in bfloat16 without DeepSpeed, either.
    config["torch_autocast"] = {"enabled": args.bf16, "dtype": "bfloat16", "lower_precision_safe_modules": []}
    return config


def make_schedule_of_config(args: TrainingArguments, optimizer: Any, num_training_steps: int) -> Any:
    """Make the schedule that the config names, one of DeepSpeed's, for `optimizer`; None if it names none.

    Raises:
        ConfigurationError: if the schedule is meant for a run of another length.
    """
    section = _found(args.deepspeed or {}, "scheduler")
    if section is None:
        return None
    wrong = list(_contradictions(args.deepspeed, _values_of_length(args, num_training_steps)))
    if wrong:
        raise ConfigurationError(f"{'; '.join(wrong)}.")
    schedules = require("deepspeed.runtime.lr_schedules", needed_by="`deepspeed`")
    arguments = filled_config(args, None, num_training_steps)["scheduler"].get("params", {})
    return getattr(schedules, section["type"])(optimizer, **arguments)


def _about_settings(config: Mapping[str, Any]) -> Iterator[str]:
    zero = config.get("zero_optimization", {})
    stage = zero.get("stage", 0)
    if stage not in _STAGES or isinstance(stage, bool):
        yield f"`deepspeed` has zero_optimization.stage: {stage!r}: give 0, 1 or 2; `fsdp` shards the weights, too"
    for path, harmless in _NOT_KEPT.items():
        if (value := _found(config, path)) not in (None, *harmless):
            yield f"`deepspeed` has {path}: {value!r}, which cannot be resumed: leave it out"


def _about_other_arguments(args: Arguments, config: Mapping[str, Any]) -> Iterator[str]:
    if _found(config, "bf16.enabled") is True:
        yield f"`deepspeed` has bf16.enabled: True, which converts the weights: write {AUTO!r} there, and set `bf16`"
    for name in ("fp16", "fsdp", "auto_find_batch_size", *DDP_OPTIONS):
        if (value := getattr(args, name)) != getattr(Arguments, name):
            yield f"`{name}` is {value!r}, which does not go with `deepspeed`: leave it out"
    kind = _found(config, "optimizer.type")
    if "optimizer" in config and (kind != "AdamW" or args.optim not in _OPTIMIZERS):
        yield (
            f"`deepspeed` has optimizer.type: {kind!r} and `optim` is {str(args.optim)!r}, but only AdamW is the same "
            "in DeepSpeed and torch: leave the section out, and give `optim` or `optimizers`"
        )
    unknown = set(_found(config, "optimizer.params") or ()) - {"lr", "betas", "eps", "weight_decay"}
    if unknown:
        yield f"`deepspeed` has optimizer.params.{', '.join(sorted(unknown))}: give it in `optim_args`"
    if "scheduler" in config:
        kind = _found(config, "scheduler.type")
        if kind not in _SCHEDULES:
            yield f"`deepspeed` has scheduler.type: {kind!r}: give {', '.join(map(repr, _SCHEDULES))}"
        elif args.lr_scheduler_type != _SCHEDULES[kind] or args.lr_scheduler_kwargs:
            yield (
                f"`deepspeed` has scheduler.type: {kind!r}, but `lr_scheduler_type` is "
                f"{str(args.lr_scheduler_type)!r}: give lr_scheduler_type={str(_SCHEDULES[kind])!r} alone"
            )


# --------------------------------------------------------------------------------------------------- values of "auto"
# By path in the config: the value, and its source in words, if the config must not contradict it.

Values = dict[str, tuple[Any, str]]


def _values_of_arguments(args: Arguments) -> Values:
    return {
        "train_micro_batch_size_per_gpu": (args.per_device_train_batch_size, "`per_device_train_batch_size`"),
        "gradient_accumulation_steps": (args.gradient_accumulation_steps, "`gradient_accumulation_steps`"),
        "gradient_clipping": (args.max_grad_norm or 0.0, "`max_grad_norm`"),
        "optimizer.params.lr": (args.learning_rate, "`learning_rate`"),
        "optimizer.params.betas": ([args.adam_beta1, args.adam_beta2], "[`adam_beta1`, `adam_beta2`]"),
        "optimizer.params.eps": (args.adam_epsilon, "`adam_epsilon`"),
        "optimizer.params.weight_decay": (args.weight_decay, "`weight_decay`"),
        "scheduler.params.warmup_min_lr": (0, ""),
        "scheduler.params.warmup_max_lr": (args.learning_rate, "`learning_rate`"),
        "fp16.enabled": (args.fp16, "`fp16`"),
        "bf16.enabled": (args.bf16, "`bf16`"),
    }


def _values_of_processes(args: TrainingArguments) -> Values:
    total = args.world_size * args.per_device_train_batch_size * args.gradient_accumulation_steps
    source = f"{args.world_size} processes x `per_device_train_batch_size` x `gradient_accumulation_steps`"
    return {"train_batch_size": (total, source)}


def _values_of_length(args: TrainingArguments, num_training_steps: int) -> Values:
    warmup = args.get_warmup_steps(num_training_steps)
    return {
        "scheduler.params.warmup_num_steps": (warmup, "the warmup by `warmup_steps`"),
        "scheduler.params.total_num_steps": (num_training_steps, "the number of updates of the run"),
    }


def _values_of_model(model: Any, config: Mapping[str, Any]) -> Values:
    path = "zero_optimization.reduce_bucket_size"
    if model is None or _found(config, path) != AUTO:
        return {}
    size = _hidden_size(getattr(model, "config", None))
    if size is None:
        raise ConfigurationError(
            f"`deepspeed` has {path}: {AUTO!r}, but the config of this {type(model).__name__} has no hidden_size."
        )
    return {path: (size * size, "")}


def _hidden_size(config: Any) -> int | None:
    for each in (config, getattr(config, "text_config", None)):
        size = getattr(each, "hidden_size", None) or max(getattr(each, "hidden_sizes", None) or [0])
        if size:
            return int(size)
    return None


def _contradictions(config: Any, values: Values) -> Iterator[str]:
    for path, (value, source) in values.items():
        given = _found(config, path)
        given = list(given) if isinstance(given, tuple) else given
        if source and given not in (None, AUTO, value):
            yield f"`deepspeed` has {path}: {given!r}, but {source} is {value!r}: write {AUTO!r} there"


def _found(config: Any, path: str) -> Any:
    """The value at `path`; None if there is none."""
    for name in filter(None, path.split(".")):
        config = config.get(name) if isinstance(config, Mapping) else None
    return config
