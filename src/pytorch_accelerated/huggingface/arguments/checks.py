"""Arguments are completed, read and checked: each by the rules of its field, then together."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from fractions import Fraction
from numbers import Real

from pytorch_accelerated.errors import ArgumentTypeError, ConfigurationError
from pytorch_accelerated.huggingface.arguments.argument import (
    A_DICT,
    A_FLAG,
    AcceleratorConfig,
    arguments_of,
    default_of,
    is_rejected,
)
from pytorch_accelerated.huggingface.arguments.deepspeed import check_deepspeed
from pytorch_accelerated.huggingface.arguments.fields import Arguments
from pytorch_accelerated.huggingface.arguments.parallel import check_fsdp
from pytorch_accelerated.huggingface.arguments.strategies import IntervalStrategy, SaveStrategy, SchedulerType


def complete(args: Arguments) -> None:
    """Bring all values into one form, and fill in those that follow from others.

    Raises:
        ArgumentTypeError: if a value is of the wrong kind.
        ConfigurationError: if a value cannot be read, or two names of one argument contradict each other.
    """
    if args.output_dir is None:
        args.output_dir = "trainer_output"
    _apply_other_names(args)
    read_values(args)
    check_kinds(args)
    _fill_in_what_follows(args)


def _apply_other_names(args: Arguments) -> None:
    """Move what was given under other names, so that a later `dataclasses.replace` can't contradict itself."""
    defaults = {field.name: default_of(field) for field in dataclasses.fields(args)}
    for other, argument in arguments_of(type(args)).items():
        if not (name := argument.same_as) or (given := getattr(args, other)) == argument.default:
            continue
        if argument.gives is not None and given is not True:
            continue  # no flag, which is reported with all other values of the wrong kind
        if argument.limit and isinstance(given, Real) and not argument.limit.holds(given):
            raise ConfigurationError(f"`{other}` is {given!r}: give {argument.limit.words}.")
        present, value = getattr(args, name), given if argument.gives is None else argument.gives
        if isinstance(value, list):
            value = [*present, *(item for item in value if item not in present)]
        elif present not in (defaults[name], value):
            raise ConfigurationError(
                f"`{other}` is {given!r} and `{name}` is {present!r}, but they are two names of one argument: "
                f"give `{name}` alone."
            )
        setattr(args, name, value)
        setattr(args, other, argument.default)


def read_values(args: Arguments) -> None:
    """Bring values into the form that is checked, strings to members of their enums for example."""
    for name in args._VALID_DICT_FIELDS:
        value = getattr(args, name, None)
        if isinstance(value, str) and value.lstrip().startswith("{"):
            setattr(args, name, A_DICT.read(name, value))
    for name, argument in arguments_of(type(args)).items():
        if argument.kind and not (getattr(args, name) is None and argument.may_be_none):
            setattr(args, name, argument.kind.read(name, getattr(args, name)))


def _fill_in_what_follows(args: Arguments) -> None:
    """Fill in defaults that depend on other arguments."""
    if args.accelerator_config is None:
        args.accelerator_config = AcceleratorConfig()  # type: ignore[assignment]  # which scripts read and change
    if args.eval_strategy == IntervalStrategy.STEPS and args.eval_steps is None:
        args.eval_steps = args.logging_steps
    if args.eval_strategy != IntervalStrategy.NO:
        args.do_eval = True
    needs_metric = args.load_best_model_at_end or args.lr_scheduler_type == SchedulerType.REDUCE_ON_PLATEAU
    if needs_metric and args.metric_for_best_model is None:
        args.metric_for_best_model = "loss"
    if args.metric_for_best_model is not None and args.greater_is_better is None:
        args.greater_is_better = not args.metric_for_best_model.endswith("loss")
    if args.torch_compile_backend is not None or args.torch_compile_mode is not None:
        args.torch_compile = True
    if args.report_to is None:
        args.report_to = [] if args.logging_dir is None else ["tensorboard"]
    if args.disable_tqdm is None:
        args.disable_tqdm = False


def check_kinds(args: Arguments) -> None:
    """Raise an ArgumentTypeError for all values of the wrong kind, and unsupported arguments."""
    if complaints := list(_about_kinds(args)):
        raise ArgumentTypeError(f"{type(args).__name__} cannot work: {'; '.join(complaints)}.")


def check_values(args: Arguments) -> None:
    """Raise a ConfigurationError for all values of the right kind that cannot work, alone or together."""
    if complaints := list(_about_values(args)):
        raise ConfigurationError(f"{type(args).__name__} cannot work: {'; '.join(complaints)}.")


def _about_kinds(args: Arguments) -> Iterator[str]:
    known = arguments_of(type(args))
    for field in dataclasses.fields(args):
        argument, default = known.get(field.name), default_of(field)
        value = vars(args).get(field.name, default)
        if argument is not None and is_rejected(field.name, argument, value):
            why = argument.why_unsupported.removesuffix(".")
            yield f"`{field.name}` is {value!r}, but this argument is unsupported. {why}"
        kind = argument.kind if argument else A_FLAG if isinstance(default, bool) else None
        may_be_none = default is None or (argument is not None and argument.may_be_none)
        if kind and not kind.holds(value) and not (value is None and may_be_none):
            yield f"`{field.name}` is {value!r}: give {kind.words}"


def _about_values(args: Arguments) -> Iterator[str]:
    for name, argument in arguments_of(type(args)).items():
        value = None if argument.why_unsupported else getattr(args, name)
        if value is None:
            continue
        if argument.limit and not argument.limit.holds(value):
            yield f"`{name}` is {value!r}: give {argument.limit.words}"
        if argument.choices and not set([value] if isinstance(value, str) else value) <= set(argument.choices):
            yield f"`{name}` is {value!r}: choose among {', '.join(map(repr, argument.choices))}{argument.otherwise}"
    yield from _about_steps(args)
    yield from _about_best_model(args)
    yield from _about_pairs(args)


def _about_steps(args: Arguments) -> Iterator[str]:
    for event in ("logging", "eval", "save"):
        name = f"{event}_steps"
        steps = getattr(args, name)
        if steps is None:
            continue
        never = steps < 0 or (steps == 0 and getattr(args, f"{event}_strategy") == IntervalStrategy.STEPS)
        if never or not math.isfinite(steps) or (steps > 1 and steps != int(steps)):
            yield f"`{name}` is {steps!r}: give a whole number of updates, or a share of the run in (0, 1)"


def _about_best_model(args: Arguments) -> Iterator[str]:
    never = args.eval_strategy == IntervalStrategy.NO
    goes_by_evaluations = {"lr_scheduler_type": SchedulerType.REDUCE_ON_PLATEAU, "save_strategy": SaveStrategy.BEST}
    for name, value in goes_by_evaluations.items():
        if never and getattr(args, name) == value:
            yield f"`{name}` is '{value}', but `eval_strategy` is 'no': choose 'steps' or 'epoch'"
    if args.load_best_model_at_end and args.save_strategy != SaveStrategy.BEST:
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
                f"{args.save_steps}, which is not a multiple of `eval_steps`, {args.eval_steps}: give one that is"
            )


def _about_pairs(args: Arguments) -> Iterator[str]:
    if args.fp16 and args.bf16:
        yield "`fp16` and `bf16` are both True, but only one of them can be used: choose one"
    for name, needed in ((name, argument.needs) for name, argument in arguments_of(type(args)).items()):
        if needed and getattr(args, name) and not getattr(args, needed):
            yield (
                f"`{name}` is {getattr(args, name)!r}, but `{needed}` is {getattr(args, needed)!r}, so it would have "
                f"no effect: set `{needed}`, or leave `{name}` out"
            )
    yield from check_deepspeed(args)
    yield from check_fsdp(args)


def _is_multiple(larger: float, smaller: float | None) -> bool:
    if not smaller or (larger < 1) != (smaller < 1):
        return False
    return (Fraction(str(larger)) / Fraction(str(smaller))).denominator == 1
