"""Checks of arguments: each by the rules of its field, then together."""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import math
from collections.abc import Iterator, Mapping
from fractions import Fraction
from typing import Any

from pytorch_accelerated.errors import ArgumentTypeError, ConfigurationError
from pytorch_accelerated.huggingface.arguments.argument import Argument, arguments_of, asks_for_nothing
from pytorch_accelerated.huggingface.arguments.deepspeed import check_deepspeed
from pytorch_accelerated.huggingface.arguments.fields import Arguments
from pytorch_accelerated.huggingface.arguments.fsdp import check_fsdp
from pytorch_accelerated.huggingface.arguments.rules import A_FLAG
from pytorch_accelerated.huggingface.arguments.strategies import IntervalStrategy, SaveStrategy, SchedulerType
from pytorch_accelerated.huggingface.engine.optimizing import why_unsupported


def reject_unknown(kind: type, given: Mapping[str, Any]) -> None:
    """Reject names that the `__init__` of a class of arguments does not have, and unsupported arguments.

    Raises:
        ArgumentTypeError: explains all of them.
    """
    parameters = inspect.signature(kind.__init__).parameters  # type: ignore[misc]  # of the class, not its instances
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return
    known = arguments_of(kind)
    complaints = [
        f"`{name}` is {value!r}, but {_why_not(kind, name, parameters)}"
        for name, value in given.items()
        if name not in parameters or _is_rejected(name, known.get(name), value)
    ]
    if complaints:
        raise ArgumentTypeError(" ".join(complaints))


def _is_rejected(name: str, argument: Argument | None, value: Any) -> bool:
    return argument is not None and bool(argument.why_unsupported) and not asks_for_nothing(name, argument, value)


def _why_not(kind: type, name: str, parameters: Mapping[str, Any]) -> str:
    known = arguments_of(kind)
    if name in known and known[name].why_unsupported:
        return f"this argument is unsupported. {known[name].why_unsupported}"
    subclasses: list[type] = kind.__subclasses__()
    for subclass in subclasses:
        if name in arguments_of(subclass).keys() - known.keys():
            return f"it is one of the {subclass.__name__}: use these, with the trainer that takes them."
    close = difflib.get_close_matches(name, parameters, n=1)
    remedy = f"Did you mean `{close[0]}`?" if close else "docs/reference/huggingface_arguments.md lists all arguments."
    return f"there is no argument of that name. {remedy}"


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
        argument, value = known.get(field.name), vars(args).get(field.name, field.default)
        if _is_rejected(field.name, argument, value):
            yield f"`{field.name}` is {value!r}, but {_why_not(type(args), field.name, known).removesuffix('.')}"
        kind = argument.kind if argument else A_FLAG if isinstance(field.default, bool) else None
        may_be_none = field.default is None or (argument is not None and argument.may_be_none)
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
    unsupported = why_unsupported(args)
    if unsupported is not None:
        yield unsupported
    yield from _about_steps(args)
    yield from _about_best_model(args)
    yield from _about_pairs(args)


def _about_steps(args: Arguments) -> Iterator[str]:
    for event in ("logging", "eval", "save"):
        name = f"{event}_steps"
        steps = getattr(args, name)
        if steps is None:
            continue
        if steps <= 0 and getattr(args, f"{event}_strategy") == IntervalStrategy.STEPS:
            yield (
                f"`{name}` is {steps!r}, so {event}_strategy='steps' would never act: give 1 or more, a share of the "
                f"run in (0, 1), or {event}_strategy='no'"
            )
        elif steps < 0 or not math.isfinite(steps) or (steps > 1 and steps != int(steps)):
            yield (
                f"`{name}` is {steps!r}, which is neither a whole number of updates nor a share of the run in (0, 1): "
                "give one of these"
            )


def _about_best_model(args: Arguments) -> Iterator[str]:
    never = args.eval_strategy == IntervalStrategy.NO
    if never and args.lr_scheduler_type == SchedulerType.REDUCE_ON_PLATEAU:
        yield (
            "`lr_scheduler_type` is 'reduce_lr_on_plateau', which depends on evaluations, but `eval_strategy` is 'no': "
            "choose 'steps' or 'epoch'"
        )
    if never and args.save_strategy == SaveStrategy.BEST:
        yield (
            "`save_strategy` is 'best', but `eval_strategy` is 'no', so no models would be compared: choose "
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
