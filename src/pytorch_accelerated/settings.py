"""What `Trainer.train` was asked to do, checked as a whole before anything is started."""

from __future__ import annotations

import dataclasses
import math
import numbers
import re
from typing import Any

import torch

from pytorch_accelerated.errors import ArgumentTypeError, ConfigurationError


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainSettings:
    """The arguments of one training run. See `Trainer.train` for what they mean.

    Raises:
        ArgumentTypeError: if something is of the wrong kind.
        ConfigurationError: if a value cannot work. All complaints of one kind come in one error.
    """

    num_epochs: int | None
    per_device_batch_size: int = 8
    eval_per_device_batch_size: int | None = None
    max_num_train_steps: int | None = None
    gradient_accumulation_steps: int = 1
    gradient_clip_value: float | None = None
    gradient_clip_norm: float | None = None
    max_duration: float | str | None = None
    step_scheduler: str = "update"
    scheduler_metric: str = "eval_loss_epoch"

    def __post_init__(self) -> None:
        wrong_kinds: list[str] = []
        wrong_values: list[str] = []
        optional = ("eval_per_device_batch_size", "max_num_train_steps")
        for name in ("num_epochs", "per_device_batch_size", "gradient_accumulation_steps", *optional):
            _check_count(name, getattr(self, name), name in optional, wrong_kinds, wrong_values)
        if self.num_epochs is None and self.max_num_train_steps is None:
            wrong_values.append("`num_epochs` and `max_num_train_steps` are both None: give one of them")
        for name in ("gradient_clip_value", "gradient_clip_norm"):
            _check_limit(name, getattr(self, name), wrong_kinds, wrong_values)
        if self.gradient_clip_value is not None and self.gradient_clip_norm is not None:
            wrong_values.append(
                f"`gradient_clip_value` is {self.gradient_clip_value} and `gradient_clip_norm` is "
                f"{self.gradient_clip_norm}: the one would undo the other, so give one of them"
            )
        if self.step_scheduler not in ("update", "epoch"):
            wrong_values.append(f"`step_scheduler` is {self.step_scheduler!r}: choose 'update' or 'epoch'")
        if self.max_duration is not None:
            try:
                seconds = parse_duration(self.max_duration)
                if not seconds > 0:
                    wrong_values.append(f"`max_duration` is {self.max_duration!r}: give a time longer than nothing")
            except ConfigurationError as error:
                wrong_values.append(str(error))
        if wrong_kinds:
            raise ArgumentTypeError("; ".join(wrong_kinds) + ".")
        if wrong_values:
            raise ConfigurationError("; ".join(wrong_values) + ".")

    @property
    def max_seconds(self) -> float | None:
        return None if self.max_duration is None else parse_duration(self.max_duration)


def check_positive_count(name: str, value: Any) -> None:
    """Refuse a size or number that is not a whole number of at least 1."""
    wrong_kinds: list[str] = []
    wrong_values: list[str] = []
    _check_count(name, value, False, wrong_kinds, wrong_values)
    if wrong_kinds:
        raise ArgumentTypeError(wrong_kinds[0] + ".")
    if wrong_values:
        raise ConfigurationError(wrong_values[0] + ".")


def parse_duration(duration: float | str) -> float:
    """Seconds of a number of seconds, or of "HH:MM:SS".

    Raises:
        ConfigurationError: for anything else.
    """
    if isinstance(duration, numbers.Real) and not isinstance(duration, bool):
        return float(duration)
    match = re.fullmatch(r"(\d+):([0-5]\d):([0-5]\d)", duration) if isinstance(duration, str) else None
    if match is None:
        raise ConfigurationError(f"`max_duration` is {duration!r}: give a number of seconds, or 'HH:MM:SS'")
    hours, minutes, seconds = map(int, match.groups())
    return 3600.0 * hours + 60 * minutes + seconds


def _check_count(name: str, value: Any, may_be_none: bool, wrong_kinds: list[str], wrong_values: list[str]) -> None:
    if value is None and (may_be_none or name == "num_epochs"):
        return
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        wrong_kinds.append(f"`{name}` is {value!r}, a {type(value).__name__}: give a whole number of at least 1")
    elif value < 1:
        wrong_values.append(f"`{name}` is {value}, but nothing can be done with less than 1: give 1 or more")


def _check_limit(name: str, value: Any, wrong_kinds: list[str], wrong_values: list[str]) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        wrong_kinds.append(f"`{name}` is {value!r}, a {type(value).__name__}: give a number, or None not to clip")
    elif not 0 < float(value) < math.inf:
        wrong_values.append(f"`{name}` is {value}, which would leave no gradient: give a number above 0, or None")


def check_scheduler_factory(factory: Any) -> None:
    """Refuse a scheduler where a function that makes one is due."""
    if factory is None:
        return
    if hasattr(factory, "step") and not isinstance(factory, type):
        raise ArgumentTypeError(
            f"`create_scheduler_fn` is a {type(factory).__name__}, a scheduler that exists already. It is made when "
            "the run starts, with the trainer's optimizer: pass a function of the optimizer, for example "
            f"`functools.partial({type(factory).__name__}, ...)` or `lambda optimizer: ...`."
        )
    if not callable(factory):
        raise ArgumentTypeError(
            f"`create_scheduler_fn` is {factory!r}, which cannot be called. Pass a function that takes the optimizer "
            "and returns a scheduler."
        )


def check_parts(model: Any, loss_func: Any) -> None:
    """Refuse a model or loss function that cannot be called."""
    if not callable(model) or isinstance(model, type):
        raise ArgumentTypeError(
            f"`model` is {model!r}, which is no module that can be called. Pass an instance of nn.Module."
        )
    if loss_func is not None and (not callable(loss_func) or isinstance(loss_func, type)):
        raise ArgumentTypeError(
            f"`loss_func` is {loss_func!r}, which does not take outputs and targets. Pass a function or an instance of "
            "a loss module, or None if the model returns its loss."
        )


def check_optimizer(optimizer: Any, *, has_own_step: bool) -> None:
    """Refuse an optimizer that cannot be stepped; `has_own_step`: the trainer's `optimizer_step` is overridden."""
    if isinstance(optimizer, type) or not hasattr(optimizer, "step"):
        raise ArgumentTypeError(
            f"`optimizer` is {optimizer!r}, which has no state to step. Pass an optimizer that was made with the "
            "model's parameters, for example `torch.optim.AdamW(model.parameters())`."
        )
    if isinstance(optimizer, torch.optim.LBFGS) and not has_own_step:
        raise ConfigurationError(
            "LBFGS evaluates the loss several times per update, through a closure that the loop cannot make for it. "
            "Use another optimizer, or override `optimizer_step` and pass it a closure there."
        )
