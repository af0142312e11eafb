"""What cannot work in the arguments of a run, in words."""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Callable, Iterator, Mapping
from fractions import Fraction
from os import PathLike
from typing import TYPE_CHECKING, Any

from pytorch_accelerated.errors import ArgumentTypeError, ConfigurationError
from pytorch_accelerated.huggingface.arguments.deepspeed import check_deepspeed
from pytorch_accelerated.huggingface.arguments.fsdp import check_fsdp
from pytorch_accelerated.huggingface.arguments.strategies import IntervalStrategy, SaveStrategy, SchedulerType
from pytorch_accelerated.huggingface.arguments.unsupported import (
    asks_for_nothing,
    explain_unknown,
    names_not_taken_over,
)
from pytorch_accelerated.huggingface.engine.optimizing import why_unsupported

if TYPE_CHECKING:
    from pytorch_accelerated.huggingface.arguments.training_arguments import TrainingArguments

LOG_LEVELS = ("passive", "debug", "info", "warning", "error", "critical")
TRACKERS = ("tensorboard",)

# A kind in words, whether a value is of it, and the arguments that must be. Flags with a default are found by that.
_KINDS: tuple[tuple[str, Callable[[Any], bool], tuple[str, ...]], ...] = (
    (
        "a whole number",
        lambda value: isinstance(value, numbers.Integral) and not isinstance(value, bool),
        (
            "per_device_train_batch_size",
            "per_device_eval_batch_size",
            "gradient_accumulation_steps",
            "max_steps",
            "seed",
            "data_seed",
            "save_total_limit",
            "eval_accumulation_steps",
            "dataloader_num_workers",
            "dataloader_prefetch_factor",
            "ddp_bucket_cap_mb",
            "ddp_timeout",
            "generation_max_length",
            "generation_num_beams",
            "per_gpu_eval_batch_size",
            "per_gpu_train_batch_size",
        ),
    ),
    (
        "a number",
        lambda value: isinstance(value, numbers.Real) and not isinstance(value, bool),
        (
            "num_train_epochs",
            "learning_rate",
            "weight_decay",
            "adam_beta1",
            "adam_beta2",
            "adam_epsilon",
            "max_grad_norm",
            "label_smoothing_factor",
            "eval_delay",
            "warmup_steps",
            "logging_steps",
            "eval_steps",
            "save_steps",
        ),
    ),
    (
        "True or False",
        lambda value: isinstance(value, bool),
        (
            "disable_tqdm",
            "greater_is_better",
            "ddp_find_unused_parameters",
            "ddp_broadcast_buffers",
            "ddp_static_graph",
        ),
    ),
    (
        "a string",
        lambda value: isinstance(value, str),
        (
            "output_dir",
            "logging_dir",
            "resume_from_checkpoint",
            "run_name",
            "optim_args",
            "torch_compile_backend",
            "torch_compile_mode",
            "length_column_name",
            "dataloader_multiprocessing_context",
            "metric_for_best_model",
            "include_num_input_tokens_seen",
            "log_level",
            "log_level_replica",
            "ddp_backend",
            "torchdynamo",
        ),
    ),
    ("True or a string", lambda value: value is True or isinstance(value, str), ("fsdp",)),
    (
        "a list of strings, even for a single one",
        lambda value: isinstance(value, (list, tuple)) and all(isinstance(item, str) for item in value),
        ("label_names", "include_for_metrics", "report_to"),
    ),
    (
        "a dict",
        lambda value: isinstance(value, Mapping),
        ("lr_scheduler_kwargs", "gradient_checkpointing_kwargs", "fsdp_config", "deepspeed"),
    ),
    (
        "a GenerationConfig, a dict of its values, or a path or name",
        lambda value: isinstance(value, (str, PathLike, Mapping)) or callable(getattr(value, "to_dict", None)),
        ("generation_config",),
    ),
)
_MAY_BE_NONE = ("max_grad_norm",)  # besides those whose default is None

_OTHERWISE = {
    "report_to": " (besides 'none' and 'all'): for another one, give its callback to the Trainer in `callbacks`, for "
    "example `transformers.integrations.WandbCallback()`"
}

# A range in words, whether a number is in it, and the arguments that must be.
_RANGES: tuple[tuple[str, Callable[[Any], bool], tuple[str, ...]], ...] = (
    (
        "1 or more",
        lambda value: value >= 1,
        (
            "per_device_train_batch_size",
            "per_device_eval_batch_size",
            "gradient_accumulation_steps",
            "eval_accumulation_steps",
            "dataloader_prefetch_factor",
            "ddp_bucket_cap_mb",
            "ddp_timeout",
            "generation_max_length",
            "generation_num_beams",
        ),
    ),
    ("1 or more, or None to keep all", lambda value: value >= 1, ("save_total_limit",)),
    ("the number of updates, or -1 for none", lambda value: value == -1 or value >= 1, ("max_steps",)),
    ("a whole number from 0 to 4294967295", lambda value: 0 <= value < 2**32, ("seed", "data_seed")),
    ("0 or more", lambda value: value >= 0, ("dataloader_num_workers",)),
    (
        "a finite number from 0 on",
        lambda value: 0 <= value < math.inf,
        ("num_train_epochs", "learning_rate", "weight_decay", "adam_epsilon", "max_grad_norm", "eval_delay"),
    ),
    (
        "a number in [0, 1)",
        lambda value: 0 <= value < 1,
        ("adam_beta1", "adam_beta2", "label_smoothing_factor"),
    ),
    (
        "a whole number of updates, 0 for no warmup, or a share of the run in (0, 1)",
        lambda value: 0 <= value < 1 or (1 <= value < math.inf and value == int(value)),
        ("warmup_steps",),
    ),
)


def check_arguments(args: TrainingArguments) -> None:
    """Refuse arguments that cannot work, alone or together.

    Raises:
        ArgumentTypeError: if a value is of the wrong kind.
        ConfigurationError: if a value cannot work. All complaints of one kind come in one error.
    """
    for kind, complaints in ((ArgumentTypeError, _about_kinds), (ConfigurationError, _about_values)):
        found = list(complaints(args))
        if found:
            raise kind(f"{type(args).__name__} cannot work: {'; '.join(found)}.")


def _about_kinds(args: TrainingArguments) -> Iterator[str]:
    not_taken_over = names_not_taken_over(type(args))
    defaults = {field.name: field.default for field in dataclasses.fields(args) if field.name not in not_taken_over}
    flags = tuple(name for name, default in defaults.items() if isinstance(default, bool))
    for kind, is_of_kind, names in (*_KINDS, ("True or False", lambda value: isinstance(value, bool), flags)):
        for name in (name for name in names if name in defaults):
            value = getattr(args, name)
            if value is None and (defaults[name] is None or name in _MAY_BE_NONE):
                continue
            if not is_of_kind(value):
                yield f"`{name}` is {value!r}: give {kind}"
    for name in not_taken_over:
        value = vars(args)[name]
        if not asks_for_nothing(name, value):
            yield explain_unknown(name, value, defaults).removesuffix(".")


def _about_values(args: TrainingArguments) -> Iterator[str]:
    fields = [field.name for field in dataclasses.fields(args)]
    for requirement, holds, names in _RANGES:
        for name in (name for name in names if name in fields):
            value = getattr(args, name)
            if value is not None and not holds(value):
                yield f"`{name}` is {value!r}: give {requirement}"
    for what, known, names in (
        ("levels", LOG_LEVELS, ("log_level", "log_level_replica")),
        ("trackers", TRACKERS, ("report_to",)),
        ("parts", ("inputs", "loss"), ("include_for_metrics",)),
        ("ways to count", ("no", "all", "non_padding"), ("include_num_input_tokens_seen",)),
    ):
        for name in names:
            given = getattr(args, name)
            if not set([given] if isinstance(given, str) else given) <= set(known):
                choice = ", ".join(map(repr, known)) + _OTHERWISE.get(name, "")
                yield f"`{name}` is {given!r}, but the known {what} are {choice}"
    unsupported = why_unsupported(args)
    if unsupported is not None:
        yield unsupported
    yield from _about_steps(args)
    yield from _about_best_model(args)
    yield from _about_pairs(args)


def _about_steps(args: TrainingArguments) -> Iterator[str]:
    for event, strategy in (
        ("logging", args.logging_strategy),
        ("eval", args.eval_strategy),
        ("save", args.save_strategy),
    ):
        name = f"{event}_steps"
        steps = getattr(args, name)
        if steps is None:
            continue
        if steps <= 0 and strategy == IntervalStrategy.STEPS:
            yield (
                f"`{name}` is {steps!r}, so with {event}_strategy='steps' it would never be time: give 1 or more, a "
                f"share of the run in (0, 1), or {event}_strategy='no'"
            )
        elif steps < 0 or not math.isfinite(steps) or (steps > 1 and steps != int(steps)):
            yield (
                f"`{name}` is {steps!r}, which is neither a whole number of updates nor a share of the run in (0, 1): "
                "give one of these"
            )


def _about_best_model(args: TrainingArguments) -> Iterator[str]:
    never = args.eval_strategy == IntervalStrategy.NO
    if never and args.lr_scheduler_type == SchedulerType.REDUCE_ON_PLATEAU:
        yield (
            "`lr_scheduler_type` is 'reduce_lr_on_plateau', which goes by evaluations, but `eval_strategy` is 'no': "
            "choose 'steps' or 'epoch'"
        )
    if never and args.save_strategy == SaveStrategy.BEST:
        yield (
            "`save_strategy` is 'best', but `eval_strategy` is 'no', so nothing would tell what is best: choose "
            "'steps' or 'epoch'"
        )
    elif args.load_best_model_at_end and args.save_strategy != SaveStrategy.BEST:
        eval_strategy, save_strategy = str(args.eval_strategy), str(args.save_strategy)
        if never or eval_strategy != save_strategy:
            yield (
                f"`load_best_model_at_end` needs a checkpoint of each evaluated model, but `eval_strategy` is "
                f"{eval_strategy!r} and `save_strategy` is {save_strategy!r}: choose 'steps' or 'epoch' for both, or "
                "save_strategy='best'"
            )
        elif eval_strategy == IntervalStrategy.STEPS and not _is_multiple(args.save_steps, args.eval_steps):
            yield (
                f"`load_best_model_at_end` needs an evaluation of each checkpoint, but `save_steps` is "
                f"{args.save_steps}, which is no multiple of `eval_steps`, {args.eval_steps}: give one that is"
            )


def _about_pairs(args: TrainingArguments) -> Iterator[str]:
    if args.fp16 and args.bf16:
        yield "`fp16` and `bf16` are both True, but there is one precision: choose one"
    if not args.dataloader_num_workers:
        for name in (
            "dataloader_prefetch_factor",
            "dataloader_persistent_workers",
            "dataloader_multiprocessing_context",
        ):
            if getattr(args, name):
                yield (
                    f"`{name}` is {getattr(args, name)!r}, but `dataloader_num_workers` is 0, so there are no workers "
                    "that it could be about: give 1 or more, or leave it out"
                )
    yield from check_deepspeed(args)
    yield from check_fsdp(args)
    if args.fsdp_config and not args.fsdp:
        yield "`fsdp_config` is given, but `fsdp` is not, so it would do nothing: give fsdp=True, or leave it out"


def _is_multiple(larger: float, smaller: float | None) -> bool:
    if not smaller or (larger < 1) != (smaller < 1):
        return False
    return (Fraction(str(larger)) / Fraction(str(smaller))).denominator == 1
