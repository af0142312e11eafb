"""A config of DeepSpeed's, as `deepspeed` gives it: what may be in it, and what its "auto" stands for.

`docs/design/deepspeed.md` says what becomes of it.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from pytorch_accelerated.errors import ConfigurationError
from pytorch_accelerated.huggingface.arguments.strategies import OptimizerNames, SchedulerType
from pytorch_accelerated.optional import require

if TYPE_CHECKING:
    from pytorch_accelerated.huggingface.arguments.training_arguments import TrainingArguments

AUTO = "auto"

_SECTIONS = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "gradient_clipping",
    "optimizer",
    "scheduler",
    "fp16",
    "bf16",
    "zero_optimization",
    "zero_allow_untested_optimizer",
    "communication_data_type",
    "prescale_gradients",
    "gradient_predivide_factor",
    "steps_per_print",
    "wall_clock_breakdown",
    "memory_breakdown",
    "dump_state",
    "comms_logger",
    "flops_profiler",
)
_SETTINGS_OF_ZERO = (
    "stage",
    "allgather_partitions",
    "allgather_bucket_size",
    "overlap_comm",
    "reduce_scatter",
    "reduce_bucket_size",
    "contiguous_gradients",
    "sub_group_size",
    "offload_optimizer",
    "offload_param",
    "round_robin_gradients",
)
_OF_THIRD_STAGE = "stage3_"  # the first stages leave these settings alone
_STAGES = (0, 1, 2)
_SCHEDULES = {
    "WarmupLR": SchedulerType.CONSTANT_WITH_WARMUP,
    "WarmupDecayLR": SchedulerType.LINEAR,
    "WarmupCosineLR": SchedulerType.COSINE,
}
_OPTIMIZERS = (OptimizerNames.ADAMW_TORCH, OptimizerNames.ADAMW_TORCH_FUSED)
# Arguments that are about DistributedDataParallel, which is not there.
_OF_DDP = ("ddp_find_unused_parameters", "ddp_bucket_cap_mb", "ddp_broadcast_buffers", "ddp_static_graph")


def check_deepspeed(args: TrainingArguments) -> Iterator[str]:
    """What cannot work in `deepspeed`, alone or together with other arguments, in words."""
    config: Any = args.deepspeed
    if config is None:
        return
    wrong = [
        name
        for name in ("fp16", "bf16", "optimizer", "scheduler", "zero_optimization")
        if not _is_section(config, name)
    ]
    if wrong:
        yield f"`deepspeed` has {' and '.join(f'{name}: {config[name]!r}' for name in wrong)}: give a dict for each"
        return
    yield from _about_settings(config)
    yield from _about_other_arguments(args, config)
    yield from _contradictions(config, _told_by_arguments(args))


def check_batches(args: TrainingArguments) -> Iterator[str]:
    """What cannot work in `deepspeed` with this number of processes, in words."""
    yield from _contradictions(args.deepspeed, _told_by_processes(args))


def check_parts(args: TrainingArguments, *, has_optimizer: bool, has_scheduler: bool) -> Iterator[str]:
    """What cannot work in `deepspeed` together with what the Trainer is given, in words."""
    for section, is_given in (("optimizer", has_optimizer), ("scheduler", has_scheduler)):
        if is_given and section in (args.deepspeed or {}):
            yield f"`deepspeed` has the section {section!r}, but the Trainer is given one, too: leave one of them out"


def filled_config(args: TrainingArguments, model: Any, num_training_steps: int | None = None) -> dict[str, Any]:
    """The config with the values that "auto" stands for, as transformers fills it in.

    Args:
        args: tell most of them.
        model: its config tells the hidden size, which sizes of ZeRO follow from.
        num_training_steps: updates of the run; None: what depends on them stays "auto".

    Raises:
        ConfigurationError: if a value cannot be told.
    """
    config: dict[str, Any] = copy.deepcopy(args.deepspeed)  # type: ignore[arg-type]  # a dict by now
    values = {**_told_by_arguments(args), **_told_by_processes(args), **_told_by_model(model, config)}
    if num_training_steps is not None:
        values.update(_told_by_length(args, num_training_steps))
    for path, (value, _) in values.items():
        if _found(config, path) == AUTO:
            section, _, name = path.rpartition(".")
            _found(config, section)[name] = value
    return config


def engine_config(args: TrainingArguments, model: Any) -> dict[str, Any] | None:
    """What DeepSpeed is told; None if it is not asked for.

    Accumulation, optimizer and schedule are not its business, and bfloat16 is torch's mixed precision.

    Raises:
        ConfigurationError: if a value cannot be told.
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
        raise ConfigurationError(
            f"`deepspeed` has {AUTO!r} for {', '.join(left)}, which no argument tells. Give a value, or leave it out."
        )
    config["train_micro_batch_size_per_gpu"] = args.per_device_train_batch_size
    config["gradient_accumulation_steps"] = 1
    # Without ZeRO the gradients are where the loop can clip them.
    config["gradient_clipping"] = args.max_grad_norm or 0.0 if zero.get("stage", 0) else 0.0
    config.setdefault("zero_allow_untested_optimizer", True)
    # No modules whose gradients would be exchanged in bfloat16: they are not elsewhere.
    config["torch_autocast"] = {"enabled": args.bf16, "dtype": "bfloat16", "lower_precision_safe_modules": []}
    return config


def make_schedule_of_config(args: TrainingArguments, optimizer: Any, num_training_steps: int) -> Any:
    """DeepSpeed's schedule that the config names, over `optimizer`; None if it names none.

    Raises:
        ConfigurationError: if the schedule does not take its settings, or is made for a run of another length.
    """
    section = _found(args.deepspeed or {}, "scheduler")
    if section is None:
        return None
    wrong = list(_contradictions(args.deepspeed, _told_by_length(args, num_training_steps)))
    if wrong:
        raise ConfigurationError(f"{'; '.join(wrong)}.")
    schedules = require("deepspeed.runtime.lr_schedules", extra="deepspeed", needed_by="`deepspeed`")
    arguments = filled_config(args, None, num_training_steps)["scheduler"].get("params", {})
    try:
        return getattr(schedules, section["type"])(optimizer, **arguments)
    except TypeError as error:
        raise ConfigurationError(
            f"`deepspeed` has a scheduler {section['type']!r} that cannot be made with params {arguments!r}: {error}. "
            "Give the ones that it takes."
        ) from error


def _about_settings(config: Mapping[str, Any]) -> Iterator[str]:
    zero = config.get("zero_optimization", {})
    stage = zero.get("stage", 0)
    if stage == 3:
        yield (
            "`deepspeed` has zero_optimization.stage: 3, whose cut weights cannot be evaluated, saved and resumed "
            "here: use `fsdp=True`, which cuts weights, gradients and the optimizer's state, or a stage up to 2"
        )
    elif stage not in _STAGES or isinstance(stage, bool):
        yield f"`deepspeed` has zero_optimization.stage: {stage!r}: give {', '.join(map(str, _STAGES))}"
    for name in ("offload_optimizer", "offload_param"):
        if (_found(zero, f"{name}.device") or "none") != "none":
            yield (
                f"`deepspeed` has zero_optimization.{name}, but what is moved to other memory cannot be saved and "
                "resumed here: leave it out"
            )
    if zero.get("round_robin_gradients"):
        yield (
            "`deepspeed` has zero_optimization.round_robin_gradients, which hides where the optimizer's state of a "
            "parameter is, so it could not be saved: leave it out"
        )
    unknown = [name for name in config if name not in _SECTIONS]
    unknown += [
        f"zero_optimization.{name}"
        for name in zero
        if name not in _SETTINGS_OF_ZERO and not name.startswith(_OF_THIRD_STAGE)
    ]
    if unknown:
        yield (
            f"`deepspeed` has {', '.join(unknown)}, of which nobody knows what it does to updates that are weighted, "
            "saved and resumed by this trainer: leave it out"
        )


def _about_other_arguments(args: TrainingArguments, config: Mapping[str, Any]) -> Iterator[str]:
    if args.fp16 or _found(config, "fp16.enabled") is True:
        yield "`deepspeed` is given and `fp16` asked for, whose loss scale could not be saved and resumed: use `bf16`"
    if _found(config, "bf16.enabled") is True:
        yield (
            "`deepspeed` has bf16.enabled: True, with which DeepSpeed turns the weights into bfloat16, while this "
            f"trainer keeps them as they are: write {AUTO!r} there, and set `bf16` for mixed precision"
        )
    if args.fsdp:
        yield f"`deepspeed` is given and `fsdp` is {args.fsdp!r}, but both share out one model: choose one"
    if args.auto_find_batch_size:
        yield (
            "`deepspeed` is given and `auto_find_batch_size` is True, but DeepSpeed cannot begin anew: set "
            "`per_device_train_batch_size`"
        )
    for name in _OF_DDP:
        if getattr(args, name) is not None:
            yield f"`{name}` is {getattr(args, name)!r}, but with `deepspeed` there is no DDP: leave it out"
    kind = _found(config, "optimizer.type")
    if "optimizer" in config and (kind != "AdamW" or args.optim not in _OPTIMIZERS):
        yield (
            f"`deepspeed` has optimizer.type: {kind!r} and `optim` is {str(args.optim)!r}, but optimizers are torch's, "
            "and only AdamW means the same in both: leave the section out, and give `optim` or `optimizers`"
        )
    unknown = set(_found(config, "optimizer.params") or ()) - {"lr", "betas", "eps", "weight_decay"}
    if unknown:
        yield f"`deepspeed` has optimizer.params.{', '.join(sorted(unknown))}: give it in `optim_args`"
    if "scheduler" in config:
        kind = _found(config, "scheduler.type")
        if kind not in _SCHEDULES:
            yield (
                f"`deepspeed` has scheduler.type: {kind!r}: give {', '.join(map(repr, _SCHEDULES))}, or leave the "
                "section out and give `lr_scheduler_type`"
            )
        elif args.lr_scheduler_type != _SCHEDULES[kind] or args.lr_scheduler_kwargs:
            yield (
                f"`deepspeed` has scheduler.type: {kind!r}, but `lr_scheduler_type` is "
                f"{str(args.lr_scheduler_type)!r} with `lr_scheduler_kwargs` {args.lr_scheduler_kwargs!r}: leave the "
                f"section out, or give lr_scheduler_type={str(_SCHEDULES[kind])!r} alone"
            )


# ------------------------------------------------------------------------------------------- what "auto" stands for
# By path in the config: the value, and what must not say anything else, if anything must not.

Told = dict[str, tuple[Any, str]]


def _told_by_arguments(args: TrainingArguments) -> Told:
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


def _told_by_processes(args: TrainingArguments) -> Told:
    total = args.world_size * args.per_device_train_batch_size * args.gradient_accumulation_steps
    return {
        "train_batch_size": (
            total,
            f"{args.world_size} processes x `per_device_train_batch_size` x `gradient_accumulation_steps`",
        )
    }


def _told_by_length(args: TrainingArguments, num_training_steps: int) -> Told:
    warmup = args.get_warmup_steps(num_training_steps)
    return {
        "scheduler.params.warmup_num_steps": (warmup, "the warmup by `warmup_steps`"),
        "scheduler.params.total_num_steps": (num_training_steps, "the number of updates of the run"),
    }


def _told_by_model(model: Any, config: Mapping[str, Any]) -> Told:
    path = "zero_optimization.reduce_bucket_size"
    if model is None or _found(config, path) != AUTO:
        return {}
    size = _hidden_size(getattr(model, "config", None))
    if size is None:
        raise ConfigurationError(
            f"`deepspeed` has {path}: {AUTO!r}, but the config of this {type(model).__name__} has no hidden_size that "
            "it would follow from. Give a number, or leave it out."
        )
    return {path: (size * size, "")}


def _hidden_size(config: Any) -> int | None:
    for each in (config, getattr(config, "text_config", None)):
        size = getattr(each, "hidden_size", None) or max(getattr(each, "hidden_sizes", None) or [0])
        if size:
            return int(size)
    return None


def _contradictions(config: Any, told: Told) -> Iterator[str]:
    for path, (value, source) in told.items():
        given = _found(config, path)
        given = list(given) if isinstance(given, tuple) else given
        if source and given not in (None, AUTO, value):
            yield f"`deepspeed` has {path}: {given!r}, but {source} is {value!r}: write {AUTO!r} there"


def _is_section(config: Mapping[str, Any], name: str) -> bool:
    return isinstance(config.get(name, {}), Mapping)


def _found(config: Any, path: str) -> Any:
    """What is at `path`; None if nothing is."""
    for name in filter(None, path.split(".")):
        config = config.get(name) if isinstance(config, Mapping) else None
    return config
