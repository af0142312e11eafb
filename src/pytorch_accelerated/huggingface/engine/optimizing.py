"""Optimizers and schedules by name."""

from __future__ import annotations

import ast
import functools
import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, ReduceLROnPlateau

from pytorch_accelerated.errors import ConfigurationError
from pytorch_accelerated.facts.optional import require
from pytorch_accelerated.huggingface.arguments.fields import Arguments, OptimizerNames, SchedulerType

Factor = Callable[[int], float]


# The class, whether it takes the arguments of Adam, and further ones.
_OF_TORCH: dict[OptimizerNames, tuple[type[torch.optim.Optimizer], bool, dict[str, Any]]] = {
    OptimizerNames.ADAMW_TORCH: (torch.optim.AdamW, True, {}),
    OptimizerNames.ADAMW_TORCH_FUSED: (torch.optim.AdamW, True, {"fused": True}),
    OptimizerNames.SGD: (torch.optim.SGD, False, {}),
    OptimizerNames.ADAGRAD: (torch.optim.Adagrad, False, {}),
    OptimizerNames.RMSPROP: (torch.optim.RMSprop, False, {}),
}


def get_optimizer_cls_and_kwargs(
    args: Arguments, model: Any = None
) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    """The class that ``args.optim`` names, and its arguments besides the parameters. Subclasses may use the model.

    Raises:
        MissingDependencyError: if it is of a package that is not installed.
    """
    name, given = OptimizerNames(args.optim), _parsed(args.optim_args) if args.optim_args else {}
    adam: dict[str, Any] = {"betas": (args.adam_beta1, args.adam_beta2), "eps": args.adam_epsilon}
    if name not in _OF_TORCH:
        return extras().class_and_arguments(args, name.value, adam, given)  # type: ignore[no-any-return]
    kind, takes_adams, others = _OF_TORCH[name]
    return kind, {"lr": args.learning_rate, **(adam if takes_adams else {}), **others, **given}


def extras() -> Any:
    """What knows the optimizers that torch doesn't have."""
    return require("pytorch_accelerated.extras.huggingface.optimizers", needed_by="`optim`")


def _parsed(optim_args: str) -> dict[str, Any]:
    """The values in ``name=value,name=value``: numbers and bools if they look like it, else strings."""
    values: dict[str, Any] = {}
    for pair in filter(None, optim_args.replace(" ", "").split(",")):
        name, separator, text = pair.partition("=")
        if not separator:
            raise ConfigurationError(f"`optim_args` is {optim_args!r}: write name=value,name=value.")
        try:
            values[name] = ast.literal_eval(text.title() if text in ("true", "false") else text)
        except (SyntaxError, ValueError):
            values[name] = text
    return values


# ------------------------------------------------------------------------------------------------------------ schedules


def make_schedule(
    kind: SchedulerType | str,
    optimizer: torch.optim.Optimizer,
    *,
    num_warmup_steps: int,
    num_training_steps: int,
    arguments: Mapping[str, Any] | None = None,
) -> LRScheduler | ReduceLROnPlateau:
    """A schedule by name: the learning rate of each update as a multiple of the optimizer's own.

    Args:
        arguments: further ones of this kind of schedule.

    Raises:
        TypeError: if the schedule does not take the arguments, or needs one that is missing.
    """
    kind, arguments = SchedulerType(kind), dict(arguments or {})
    if kind is SchedulerType.REDUCE_ON_PLATEAU:
        return ReduceLROnPlateau(optimizer, **arguments)
    make = _SCHEDULES[kind]
    # Some need the rate that they start from, because their minimum is a rate instead of a share.
    known = {"warmup": num_warmup_steps, "total": num_training_steps, "peak": optimizer.defaults["lr"]}
    needed = {name: value for name, value in known.items() if name in inspect.signature(make).parameters}
    return LambdaLR(optimizer, make(**needed, **arguments))


def _falling(warmup: int, total: int, height: Callable[[float], float], least: float = 0.0) -> Factor:
    """Down to `least` after the warmup, in a shape that goes from 1 to 0 with the share that is done."""

    def factor(step: int) -> float:
        if step < warmup:
            return step / max(1, warmup)
        return max(0.0, height((step - warmup) / max(1, total - warmup)) * (1 - least) + least)

    return factor


def _linear(*, warmup: int, total: int) -> Factor:
    return _falling(warmup, total, lambda done: 1.0 - done)


def _cosine(
    *,
    warmup: int,
    total: int,
    peak: float,
    num_cycles: float = 0.5,
    min_lr: float | None = None,
    min_lr_rate: float | None = None,
) -> Factor:
    """Down to a least rate, given itself or as a share of the peak."""
    if (min_lr is None) == (min_lr_rate is None):
        raise TypeError("give one of min_lr and min_lr_rate")
    least = min_lr / peak if min_lr_rate is None else min_lr_rate  # type: ignore[operator]  # one of them is given
    return _falling(warmup, total, lambda done: _wave(2.0 * num_cycles * done), least)


def _wave(half_turns: float) -> float:
    return 0.5 * (1.0 + math.cos(math.pi * half_turns))


def _cosine_one_step_ahead(
    *, warmup: int, total: int, peak: float, warmup_lr_rate: float | None = None, **arguments: Any
) -> Factor:
    """The same, but the first update has a rate above 0: `warmup_lr_rate` of the peak, if that is given."""
    cosine = _cosine(warmup=0, total=total - warmup, peak=peak, **arguments)
    first = 1 / max(1, warmup) if warmup_lr_rate is None else warmup_lr_rate

    def factor(step: int) -> float:
        return cosine(step - warmup + 1) if step >= warmup else first + (1 - first) * step / max(1, warmup - 1)

    return factor


def _cosine_with_restarts(*, warmup: int, total: int, num_cycles: int = 1) -> Factor:
    return _falling(warmup, total, lambda done: 0.0 if done >= 1 else _wave((num_cycles * done) % 1.0))


def _polynomial(*, warmup: int, total: int, peak: float, lr_end: float = 1e-7, power: float = 1.0) -> Factor:
    return _falling(warmup, total, lambda done: max(0.0, 1.0 - done) ** power, lr_end / peak)


def _constant() -> Factor:
    return lambda step: 1.0


def _constant_with_warmup(*, warmup: int) -> Factor:
    return _falling(warmup, warmup, lambda done: 1.0)


def _inverse_sqrt(*, warmup: int, timescale: int | None = None) -> Factor:
    scale = timescale or warmup or 10_000
    return _falling(warmup, warmup + 1, lambda done: 1.0 / math.sqrt((done + scale) / scale))


def _warmup_stable_decay(
    *,
    warmup: int,
    total: int,
    num_decay_steps: int,
    num_stable_steps: int | None = None,
    warmup_type: str = "linear",
    decay_type: str = "cosine",
    min_lr_ratio: float = 0.0,
    num_cycles: float = 0.5,
) -> Factor:
    stable = total - warmup - num_decay_steps if num_stable_steps is None else num_stable_steps
    shapes: dict[str, Callable[[float], float]] = {
        "linear": lambda left: left,
        "cosine": lambda left: _wave(2.0 * num_cycles * (1.0 - left)),
        "1-sqrt": lambda left: 1.0 - math.sqrt(1.0 - left),
    }
    for name, shape in (("warmup_type", warmup_type), ("decay_type", decay_type)):
        if shape not in shapes:
            raise TypeError(f"{name} is {shape!r}, choose one of {', '.join(map(repr, shapes))}")

    def factor(step: int) -> float:
        if step >= warmup + stable + num_decay_steps:
            return min_lr_ratio
        if step < warmup:
            height = shapes[warmup_type](step / max(1, warmup))
        else:
            height = shapes[decay_type](min(1.0, 1.0 - (step - warmup - stable) / max(1, num_decay_steps)))
        return max(0.0, height * (1 - min_lr_ratio) + min_lr_ratio)

    return factor


def refuse_foreign_schedule(optimizer: Any, schedule: Any) -> None:
    """Reject a schedule that belongs to another optimizer, if it says so: it would change nothing.

    Raises:
        ConfigurationError: says how to make both.
    """
    scheduled = getattr(schedule, "optimizer", None)
    inner, trained = (getattr(one, "optimizer", one) for one in (scheduled, optimizer))  # of accelerate's wrappers
    if scheduled is not None and inner is not trained:
        raise ConfigurationError(
            f"The schedule, a {type(schedule).__name__}, belongs to another optimizer than the one that trains. Make "
            "it of that one, or override `create_scheduler`, which gets it."
        )


_SCHEDULES: dict[SchedulerType, Callable[..., Factor]] = {
    SchedulerType.LINEAR: _linear,
    SchedulerType.COSINE: functools.partial(_cosine, min_lr_rate=0.0),
    SchedulerType.COSINE_WITH_RESTARTS: _cosine_with_restarts,
    SchedulerType.POLYNOMIAL: _polynomial,
    SchedulerType.CONSTANT: _constant,
    SchedulerType.CONSTANT_WITH_WARMUP: _constant_with_warmup,
    SchedulerType.INVERSE_SQRT: _inverse_sqrt,
    SchedulerType.COSINE_WITH_MIN_LR: _cosine,
    SchedulerType.COSINE_WARMUP_WITH_MIN_LR: _cosine_one_step_ahead,
    SchedulerType.WARMUP_STABLE_DECAY: _warmup_stable_decay,
}
