"""DeepSpeed's config: the way into a process that trains with it, its checks, and the values that "auto" stands for.

A config is read by paths, such as ``"zero_optimization.stage"``. The config as the user wrote it is never changed.
"""

from __future__ import annotations

import contextlib
import copy
import difflib
import os
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch

from pytorch_accelerated.errors import ConfigurationError, LaunchError
from pytorch_accelerated.facts import require, trees

if TYPE_CHECKING:
    from pytorch_accelerated.huggingface import Trainer, TrainingArguments

AUTO = "auto"
# By path in the config: the value that "auto" stands for, and its source in words, or "" if any other value is fine.
Values = dict[str, tuple[Any, str]]

_SECTIONS = ("fp16", "bf16", "optimizer", "scheduler", "zero_optimization")
# By section: a type to suggest, and the arguments for the type and for its settings.
_PARTS = {
    "optimizer": ("AdamW", "optim", "optim_args"),
    "scheduler": ("WarmupLR", "lr_scheduler_type", "lr_scheduler_kwargs"),
}
# Defaults are taken for left out, whatever the config says. Both may name a schedule, if its shape is the same.
_DEFAULTS = ("adamw_torch", "adamw_torch_fused", "linear")
_SCHEDULES = {"WarmupLR": "constant_with_warmup", "WarmupCosineLR": "cosine"}
# The engine has its own ways of exchanging gradients, and its own batch size.
_REPLACED = ("ddp_find_unused_parameters", "ddp_bucket_cap_mb", "ddp_broadcast_buffers", "ddp_static_graph")
_DONT_GO_WITH = ("fsdp", "auto_find_batch_size", *_REPLACED)
# What DeepSpeed 0.19 reads of a config, except for what divides batches or layers. It ignores any other name; one that
# resembles these is taken for a mistake, and any other for that of a later version.
_NAMES = """
    activation_checkpointing aio autotuning bf16 bfloat16 checkpoint comet comms_logger communication_data_type compile
    csv_monitor data_efficiency data_types dataloader_drop_last datastates_ckpt disable_allgather disable_python_gc
    dump_state expert_parallel flops_profiler fp16 gradient_accumulation_steps gradient_allreduce_op gradient_clipping
    gradient_predivide_factor hybrid_engine log_level managed_gradient_accumulation memory_breakdown optimizer pipeline
    prescale_gradients scheduler seq_parallel_communication_data_type steps_per_print tensor_parallel tensorboard timers
    torch_autocast train_batch_size train_micro_batch_size_per_gpu use_data_before_expert_parallelism vocabulary_size
    wall_clock_breakdown wandb weight_quantization zero_allow_untested_optimizer zero_force_ds_cpu_optimizer
    zero_optimization
"""
_NOT_HERE = ("amp.enabled", "data_efficiency.enabled", "expert_parallel.enabled", "tensor_parallel.autotp_size")
_OFFLOADS = {"offload_optimizer": 1, "offload_param": 3}  # the stage from which on DeepSpeed reads it


@contextlib.contextmanager
def starting(plugin: Any) -> Iterator[Any]:
    """Context in which an `Accelerator` is made that trains with DeepSpeed. Afterwards, others can be made without it.

    Args:
        plugin: accelerate's `DeepSpeedPlugin`; None: the one that `accelerate launch` describes.

    Raises:
        ConfigurationError: if accelerate refuses the config.
        LaunchError: without a launcher.
        MissingDependencyError: without DeepSpeed.
    """
    require("deepspeed", needed_by="DeepSpeed, which this process is set up for,")
    if "LOCAL_RANK" not in os.environ:
        raise LaunchError(
            "DeepSpeed is asked for, but this process was started without a launcher, which it needs for a single "
            "process, too. Start it with: torchrun --nproc-per-node 1 your_script.py"
        )
    # accelerate asks these variables, which it sets itself, too; the second one would make it leave DeepSpeed out.
    before = {name: os.environ.pop(name, None) for name in ("ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_CPU")}
    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    try:
        yield _utils().DeepSpeedPlugin() if plugin is None else plugin
    except ValueError as error:
        raise ConfigurationError(f"accelerate refuses the config of DeepSpeed: {error}") from error
    finally:
        del os.environ["ACCELERATE_USE_DEEPSPEED"]
        os.environ.update({name: value for name, value in before.items() if value is not None})


def complaints(args: TrainingArguments) -> Iterator[str]:
    """What cannot work in the config, alone or together with other arguments."""
    config: Any = args.deepspeed
    for name in _SECTIONS:
        if not isinstance(config.get(name, {}), Mapping):
            yield f"`deepspeed` has {name}: {config[name]!r}: give a dict"
            return
    for name in _DONT_GO_WITH:
        if value := getattr(args, name):
            yield f"`{name}` is {value!r}, but `deepspeed` is given, which doesn't go with it: leave one out"
    yield from (f"`deepspeed` has {each}" for each in misfits(config))
    yield from _about_parts(args, config)
    yield from contradictions(config, _values_of_arguments(args))


def complaints_about_parts(args: TrainingArguments, optimizer: Any, schedule: Any) -> Iterator[str]:
    """What cannot work in the config together with what the Trainer is given, and with the number of processes."""
    config: Any = args.deepspeed
    for section, part in (("optimizer", optimizer), ("scheduler", schedule)):
        if part is not None and section in config:
            kind = found(config, f"{section}.type")
            yield (
                f"`deepspeed` has {section}.type: {kind!r}, and the Trainer is given a {type(part).__name__}: "
                "leave one out"
            )
    yield from contradictions(config, _values_of_processes(args))


def config_of_launcher() -> dict[str, Any]:
    """The config that `accelerate launch` describes in the environment."""
    config: dict[str, Any] = _utils().DeepSpeedPlugin().deepspeed_config
    config.pop("steps_per_print")  # infinite, which JSON doesn't know
    return config


def plugin_of(args: TrainingArguments) -> Any:
    """accelerate's plugin, with the values of all arguments in its config.

    With transformers, that is one of its own, which its models look for while they are made: as long as it lives, ZeRO
    3 divides their weights over the ranks.
    """
    is_installed = find_spec("deepspeed") is not None
    if is_installed and find_spec("transformers"):
        module = require("transformers.integrations", needed_by="`deepspeed`")
    else:
        module = require("accelerate.utils.deepspeed", needed_by="`deepspeed`")
    config = module.HfDeepSpeedConfig(copy.deepcopy(args.deepspeed))
    config.config.setdefault("zero_optimization", {}).setdefault("stage", 0)
    config.set_stage_and_offload()
    fill(config.config, args.deepspeed, {**_values_of_arguments(args), **_values_of_processes(args)})
    if is_installed and config.is_zero3() and args.world_size > 1:
        require("deepspeed", needed_by="`deepspeed`").init_distributed()  # with the processes that torch knows already
    return _utils().DeepSpeedPlugin(hf_ds_config=config)


def prepare(face: Trainer, num_training_steps: int) -> bool:
    """Fill in what only a run knows. Returns whether DeepSpeed makes the optimizer.

    Raises:
        ConfigurationError: if a value contradicts the run.
    """
    config = face.args.hf_deepspeed_config.config  # type: ignore[attr-defined]  # of the plugin
    fill_in(config, face.args, face.model, num_training_steps)
    if "optimizer" in config:
        face.optimizer = _utils().DummyOptim([each for each in face.model.parameters() if each.requires_grad])
        face.lr_scheduler = None  # made once there is an optimizer
        return True
    if "scheduler" in config:
        face.lr_scheduler = make_schedule(config, face.create_optimizer())
    return False


def in_precision_of(model: Any, inputs: Any, parts: Any = trees.parts_of) -> Any:
    """The inputs with numbers in 16 bits if the model has such weights, into which its engine has converted it."""
    dtype = next((each.dtype for each in model.parameters() if each.is_floating_point()), torch.float32)
    if dtype.itemsize != 2:
        return inputs

    def convert(leaf: Any) -> Any:
        return leaf.to(dtype) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf

    return trees.map_leaves(convert, inputs, keep_mappings=True, parts=parts)


def schedule_of(face: Trainer, optimizer: Any) -> Any:
    """The schedule of the config, or else of the arguments, for the optimizer that DeepSpeed has made."""
    config = face.args.hf_deepspeed_config.config  # type: ignore[attr-defined]  # of the plugin
    return make_schedule(config, optimizer) or face.create_scheduler(face.state.max_steps, optimizer)


def make_schedule(config: Mapping[str, Any], optimizer: Any) -> Any:
    """The schedule that the config names, one of DeepSpeed's; None if it names none.

    Raises:
        ConfigurationError: if DeepSpeed has none of this name, or doesn't take its settings.
    """
    kind = found(config, "scheduler.type")
    if kind is None:
        return None
    module = require("deepspeed.runtime.lr_schedules", needed_by="`deepspeed`")
    settings = found(config, "scheduler.params") or {}
    try:
        return getattr(module, kind)(optimizer, **settings)
    except (AttributeError, TypeError, ValueError) as error:
        raise ConfigurationError(
            f"DeepSpeed cannot make its scheduler {kind!r} with {settings!r}: {error}. It has "
            f"{', '.join(module.VALID_LR_SCHEDULES)}."
        ) from error


def fill_in(config: dict[str, Any], args: TrainingArguments, model: Any, num_training_steps: int) -> None:
    """Fill in what follows from arguments, model and length of a run. Any other "auto" is DeepSpeed's default.

    Raises:
        ConfigurationError: if one contradicts them.
    """
    values = _values_of_length(args, num_training_steps)
    if wrong := list(contradictions(args.deepspeed, values)):
        raise ConfigurationError(f"DeepSpeed cannot begin: {'; '.join(wrong)}.")
    values |= _values_of_arguments(args) | _values_of_processes(args) | _values_of_model(model, config)
    fill(config, args.deepspeed, values)


def _utils() -> Any:
    return require("accelerate.utils", needed_by="`deepspeed`")


def _about_parts(args: TrainingArguments, config: Any) -> Iterator[str]:
    """Sections about what arguments describe, too."""
    for section, (example, *names) in _PARTS.items():
        if section not in config:
            continue
        kind = found(config, f"{section}.type")
        if not isinstance(kind, str):
            yield f"`deepspeed` has {section}.type: {kind!r}: give a name, such as {example!r}, or leave it all out"
        for name in names:
            value: Any = getattr(args, name)
            value = str(value) if isinstance(value, str) else value  # rather than the member of an enumeration
            if value and value not in (*_DEFAULTS, _SCHEDULES.get(str(kind))):
                yield f"`deepspeed` has {section}.type: {kind!r}, but `{name}` is {value!r}: leave one out"


def _values_of_arguments(args: TrainingArguments) -> Values:
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
    warmup = max(1, args.get_warmup_steps(num_training_steps))  # DeepSpeed takes no 0
    return {
        "scheduler.params.total_num_steps": (num_training_steps, "the number of updates of the run"),
        "scheduler.params.warmup_num_steps": (warmup, "the warmup by `warmup_steps`"),
    }


def _values_of_model(model: Any, config: Any) -> Values:
    """Sizes of buckets that follow from the width of the model."""
    size = _hidden_size(getattr(model, "config", None))
    if size is None:
        return {}
    values: Values = {"zero_optimization.reduce_bucket_size": (size * size, "")}
    if found(config, "zero_optimization.stage") == 3:
        values["zero_optimization.stage3_prefetch_bucket_size"] = (int(0.9 * size * size), "")
        values["zero_optimization.stage3_param_persistence_threshold"] = (10 * size, "")
    return values


def _hidden_size(config: Any) -> int | None:
    for each in (config, getattr(config, "text_config", None)):
        if size := getattr(each, "hidden_size", None) or max(getattr(each, "hidden_sizes", None) or [0]):
            return int(size)
    return None


def misfits(config: Mapping[str, Any]) -> Iterator[str]:
    """What no run can do with a config, by which part of it."""
    known = _NAMES.split()
    for name in config:
        for nearest in () if name in known else difflib.get_close_matches(name, known, 1, 0.85):
            yield f"{name!r}, which has no effect here: leave it out, or write {nearest!r}"
    yield from (f"{path}: {found(config, path)!r}: leave it out" for path in _NOT_HERE if found(config, path))
    stage = found(config, "zero_optimization.stage") or 0
    if stage not in (0, 1, 2, 3):
        yield f"zero_optimization.stage: {stage!r}: give 0, 1, 2 or 3"
        return
    for name, first in _OFFLOADS.items():
        path = f"zero_optimization.{name}.device"
        device = found(config, path)
        if device not in (None, "none", "cpu"):
            yield f"{path}: {device!r}, from which no state is saved: give 'cpu'"
        elif device == "cpu" and stage < first:
            yield f"{path}: 'cpu', which has no effect at stage {stage}: use stage {first}, or leave it out"


def contradictions(
    config: Any, values: Values, *, whose: str = "`deepspeed`", advice: str = f"write {AUTO!r} there"
) -> Iterator[str]:
    for path, (value, source) in values.items():
        given = found(config, path)
        given = list(given) if isinstance(given, tuple) else given
        if source and given not in (None, AUTO, value):
            yield f"{whose} has {path}: {given!r}, but {source} is {value!r}: {advice}"


def fill(config: dict[str, Any], given: Any, values: Values) -> None:
    """Set values that the user's config leaves open: by "auto", and sizes and clipping by nothing, too."""
    for path, (value, _) in values.items():
        section, _, name = path.rpartition(".")
        if found(given, path) == AUTO or (not section and found(given, path) is None):
            found(config, section)[name] = value


def found(config: Any, path: str) -> Any:
    """The value at `path`; None if there is none."""
    for name in filter(None, path.split(".")):
        config = config.get(name) if isinstance(config, Mapping) else None
    return config
