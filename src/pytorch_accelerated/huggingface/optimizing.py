"""Optimizers and schedules by name, as training arguments give them."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, ReduceLROnPlateau

from pytorch_accelerated.errors import ConfigurationError
from pytorch_accelerated.huggingface.strategies import OptimizerNames, SchedulerType

if TYPE_CHECKING:
    from pytorch_accelerated.huggingface.arguments import TrainingArguments

Factor = Callable[[int], float]


def decay_parameter_names(model: nn.Module) -> list[str]:
    """The parameters that weight decay acts on: all but biases and those of norm layers."""
    exempt = {
        f"{path}.{name}" if path else name
        for path, module in model.named_modules()
        for name, _ in module.named_parameters(recurse=False)
        if "bias" in name or "norm" in type(module).__name__.lower()
    }
    return [name for name, _ in model.named_parameters() if name not in exempt]


def parameter_groups(model: nn.Module, decayed: list[str], weight_decay: float) -> list[dict[str, Any]]:
    """The trainable parameters in two groups: those with weight decay, and the others."""
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    names = set(decayed)
    return [
        {"params": [value for name, value in trained.items() if name in names], "weight_decay": weight_decay},
        {"params": [value for name, value in trained.items() if name not in names], "weight_decay": 0.0},
    ]


def optimizer_class_and_arguments(args: TrainingArguments) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    """The class that ``args.optim`` names, and what it is made with besides the parameters."""
    common = {"lr": args.learning_rate, **_parsed(args.optim_args)}
    adam = {"betas": (args.adam_beta1, args.adam_beta2), "eps": args.adam_epsilon}
    if args.optim == OptimizerNames.ADAMW_TORCH:
        return torch.optim.AdamW, {**adam, **common}
    if args.optim == OptimizerNames.ADAMW_TORCH_FUSED:
        return torch.optim.AdamW, {**adam, "fused": True, **common}
    others = {
        OptimizerNames.SGD: torch.optim.SGD,
        OptimizerNames.ADAGRAD: torch.optim.Adagrad,
        OptimizerNames.RMSPROP: torch.optim.RMSprop,
    }
    return others[OptimizerNames(args.optim)], common


def make_optimizer(
    kind: type[torch.optim.Optimizer], arguments: Mapping[str, Any], groups: list[dict[str, Any]]
) -> torch.optim.Optimizer:
    """An optimizer over `groups`.

    Raises:
        ConfigurationError: if the class refuses the arguments.
    """
    try:
        return kind(groups, **arguments)
    except (TypeError, ValueError) as error:
        shown = ", ".join(f"{name}={value!r}" for name, value in arguments.items())
        raise ConfigurationError(
            f"{kind.__name__} refused the arguments {shown}: {error}. Change `learning_rate`, the `adam_...` "
            "arguments or `optim_args`."
        ) from error


def _parsed(optim_args: str | None) -> dict[str, Any]:
    """The values in ``name=value,name=value``: numbers and bools where they look like it, else strings."""
    words = {"True": True, "true": True, "False": False, "false": False, "None": None}
    values: dict[str, Any] = {}
    for pair in filter(None, (optim_args or "").replace(" ", "").split(",")):
        name, separator, text = pair.partition("=")
        if not separator or not name:
            raise ConfigurationError(
                f"`optim_args` is {optim_args!r}, but {pair!r} in it has no name and value. Write name=value pairs "
                "with commas between them, for example 'momentum=0.9,nesterov=True'."
            )
        try:
            values[name] = words[text] if text in words else float(text) if "." in text or "e" in text else int(text)
        except ValueError:
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
        kind: a `SchedulerType` or its string.
        optimizer: whose learning rate it sets.
        num_warmup_steps: updates in which the rate rises from 0.
        num_training_steps: updates of the whole run.
        arguments: further ones of this kind of schedule.

    Raises:
        ConfigurationError: if the schedule does not take the arguments, or needs one that is missing.
    """
    kind, arguments = SchedulerType(kind), dict(arguments or {})
    try:
        if kind is SchedulerType.REDUCE_ON_PLATEAU:
            return ReduceLROnPlateau(optimizer, **arguments)
        make = _SCHEDULES[kind]
        # Several need to know the rate that they start from, or take the least one as a rate instead of a share.
        known = {"warmup": num_warmup_steps, "total": num_training_steps, "peak": optimizer.defaults["lr"]}
        needed = {name: value for name, value in known.items() if name in inspect.signature(make).parameters}
        return LambdaLR(optimizer, make(**needed, **arguments))
    except TypeError as error:
        raise ConfigurationError(
            f"The schedule {kind.value!r} cannot be made with `lr_scheduler_kwargs` {arguments!r}: {error}. Give the "
            "arguments that this schedule takes."
        ) from error


def _warmed_up(warmup: int, after: Factor) -> Factor:
    return lambda step: step / max(1, warmup) if step < warmup else after(step)


def _progress(step: int, warmup: int, total: int) -> float:
    return (step - warmup) / max(1, total - warmup)


def _linear(*, warmup: int, total: int) -> Factor:
    return _warmed_up(warmup, lambda step: max(0.0, (total - step) / max(1, total - warmup)))


def _cosine(*, warmup: int, total: int, num_cycles: float = 0.5) -> Factor:
    return _cosine_above(0.0, warmup, total, num_cycles)


def _cosine_with_min_lr(
    *,
    warmup: int,
    total: int,
    peak: float,
    num_cycles: float = 0.5,
    min_lr: float | None = None,
    min_lr_rate: float | None = None,
) -> Factor:
    if (min_lr is None) == (min_lr_rate is None):
        raise TypeError("give one of min_lr and min_lr_rate")
    least = min_lr / peak if min_lr is not None else min_lr_rate
    assert least is not None
    return _cosine_above(least, warmup, total, num_cycles)


def _cosine_above(least: float, warmup: int, total: int, num_cycles: float) -> Factor:
    def factor(step: int) -> float:
        wave = 0.5 * (1.0 + math.cos(2.0 * math.pi * num_cycles * _progress(step, warmup, total)))
        return max(0.0, wave * (1 - least) + least)

    return _warmed_up(warmup, factor)


def _cosine_with_restarts(*, warmup: int, total: int, num_cycles: int = 1) -> Factor:
    def factor(step: int) -> float:
        progress = _progress(step, warmup, total)
        return 0.0 if progress >= 1 else 0.5 * (1.0 + math.cos(math.pi * ((num_cycles * progress) % 1.0)))

    return _warmed_up(warmup, factor)


def _polynomial(*, warmup: int, total: int, peak: float, lr_end: float = 1e-7, power: float = 1.0) -> Factor:
    def factor(step: int) -> float:
        if step > total:
            return lr_end / peak
        left: float = (1 - _progress(step, warmup, total)) ** power
        return ((peak - lr_end) * left + lr_end) / peak

    return _warmed_up(warmup, factor)


def _constant() -> Factor:
    return lambda step: 1.0


def _constant_with_warmup(*, warmup: int) -> Factor:
    return _warmed_up(warmup, _constant())


def _inverse_sqrt(*, warmup: int, timescale: int | None = None) -> Factor:
    scale = timescale or warmup or 10_000
    return _warmed_up(warmup, lambda step: 1.0 / math.sqrt((step + scale - warmup) / scale))


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
        "cosine": lambda left: 0.5 * (1.0 + math.cos(2.0 * math.pi * num_cycles * (1.0 - left))),
        "1-sqrt": lambda left: 1.0 - math.sqrt(1.0 - left),
    }
    for name, shape in (("warmup_type", warmup_type), ("decay_type", decay_type)):
        if shape not in shapes:
            raise TypeError(f"{name} is {shape!r}, choose one of {', '.join(map(repr, shapes))}")

    def factor(step: int) -> float:
        if warmup <= step < warmup + stable:
            return 1.0
        if step < warmup:
            height = shapes[warmup_type](step / max(1, warmup))
        elif step < warmup + stable + num_decay_steps:
            height = shapes[decay_type](1.0 - (step - warmup - stable) / max(1, num_decay_steps))
        else:
            return min_lr_ratio
        return max(0.0, height * (1 - min_lr_ratio) + min_lr_ratio)

    return factor


_SCHEDULES: dict[SchedulerType, Callable[..., Factor]] = {
    SchedulerType.LINEAR: _linear,
    SchedulerType.COSINE: _cosine,
    SchedulerType.COSINE_WITH_RESTARTS: _cosine_with_restarts,
    SchedulerType.POLYNOMIAL: _polynomial,
    SchedulerType.CONSTANT: _constant,
    SchedulerType.CONSTANT_WITH_WARMUP: _constant_with_warmup,
    SchedulerType.INVERSE_SQRT: _inverse_sqrt,
    SchedulerType.COSINE_WITH_MIN_LR: _cosine_with_min_lr,
    SchedulerType.WARMUP_STABLE_DECAY: _warmup_stable_decay,
}
