"""The arguments of `Trainer.train`, checked together before anything starts."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
import numbers
import os
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from pytorch_accelerated.errors import ArgumentTypeError, ConfigurationError, HookOutputError
from pytorch_accelerated.tracking.history import RunHistory

_LONGEST_SHOWN = 80  # characters of a wrong value


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainSettings:
    """The arguments of one training run. `Trainer.train` describes them.

    Raises:
        ArgumentTypeError: if a value has the wrong type.
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
    nonfinite_policy: str | None = None
    max_skipped_updates: int = 10
    split_on_oom: bool = False
    overfit_batches: int | None = None
    record_every_n_steps: int | None = None
    detect_anomaly: bool = False

    def __post_init__(self) -> None:
        wrong_kinds: list[str] = []
        wrong_values: list[str] = []
        optional = (
            "num_epochs",
            "eval_per_device_batch_size",
            "max_num_train_steps",
            "overfit_batches",
            "record_every_n_steps",
        )
        counts = ("per_device_batch_size", "gradient_accumulation_steps", "max_skipped_updates", *optional)
        limits = ("gradient_clip_value", "gradient_clip_norm")
        for name in counts:
            _check_count(name, getattr(self, name), name in optional, wrong_kinds, wrong_values)
        for name in limits:
            _check_limit(name, getattr(self, name), wrong_kinds, wrong_values)
        if self.num_epochs is None and self.max_num_train_steps is None:
            wrong_values.append("`num_epochs` and `max_num_train_steps` are both None: set one of them")
        if self.gradient_clip_value is not None and self.gradient_clip_norm is not None:
            wrong_values.append(
                f"`gradient_clip_value` is {self.gradient_clip_value} and `gradient_clip_norm` is "
                f"{self.gradient_clip_norm}: one would undo the other, so set only one of them"
            )
        if not _is_one_of(self.step_scheduler, "update", "epoch"):
            wrong_values.append(f"`step_scheduler` is {self.step_scheduler!r}: choose 'update' or 'epoch'")
        if not isinstance(self.scheduler_metric, str):
            wrong_kinds.append(f"`scheduler_metric` is {self.scheduler_metric!r}: pass the name of a metric")
        if not _is_one_of(self.nonfinite_policy, None, "skip", "rollback"):
            wrong_values.append(
                f"`nonfinite_policy` is {self.nonfinite_policy!r}: choose 'skip' or 'rollback', or None"
            )
        for name in ("split_on_oom", "detect_anomaly"):
            if not isinstance(getattr(self, name), bool):
                wrong_kinds.append(f"`{name}` is {getattr(self, name)!r}: pass True or False")
        if self.max_duration is not None:
            try:
                seconds = parse_duration(self.max_duration)
                if not seconds > 0:
                    wrong_values.append(f"`max_duration` is {self.max_duration!r}: pass a time above 0")
            except ConfigurationError as error:
                wrong_values.append(str(error))
        if wrong_kinds:
            raise ArgumentTypeError("; ".join(wrong_kinds) + ".")
        if wrong_values:
            raise ConfigurationError("; ".join(wrong_values) + ".")
        # Numpy's numbers are accepted, but converted to Python's before they are saved and shown.
        for names, kind in ((counts, int), (limits, float)):
            for name in names:
                if getattr(self, name) is not None:
                    object.__setattr__(self, name, kind(getattr(self, name)))

    def passes_over(self, updates_per_epoch: int | None) -> int:
        """How often the training data will be read, as far as that is known.

        Args:
            updates_per_epoch: None if the data has no length.
        """
        if self.max_num_train_steps is None or updates_per_epoch is None:
            return self.num_epochs or 1
        return -(-self.max_num_train_steps // max(updates_per_epoch, 1))

    @functools.cached_property
    def clips_gradients(self) -> bool:
        """Whether gradients are clipped."""
        return self.gradient_clip_value is not None or self.gradient_clip_norm is not None

    @property
    def max_seconds(self) -> float | None:
        """`max_duration` in seconds."""
        return None if self.max_duration is None else parse_duration(self.max_duration)


def _is_one_of(value: Any, *words: str | None) -> bool:
    """Whether `value` is one of `words`, for any type of value: arrays compare differently."""
    return (value is None or isinstance(value, str)) and value in words


def check_positive_count(name: str, value: Any) -> None:
    """Reject a size or number that is not an integer of at least 1."""
    wrong_kinds: list[str] = []
    wrong_values: list[str] = []
    _check_count(name, value, False, wrong_kinds, wrong_values)
    if wrong_kinds:
        raise ArgumentTypeError(wrong_kinds[0] + ".")
    if wrong_values:
        raise ConfigurationError(wrong_values[0] + ".")


def parse_duration(duration: float | str) -> float:
    """The seconds in a number of seconds or in "HH:MM:SS".

    Raises:
        ConfigurationError: for anything else.
    """
    if isinstance(duration, numbers.Real) and not isinstance(duration, bool):
        return float(duration)
    match = re.fullmatch(r"(\d+):([0-5]\d):([0-5]\d)", duration) if isinstance(duration, str) else None
    if match is None:
        raise ConfigurationError(f"`max_duration` is {duration!r}: pass a number of seconds, or 'HH:MM:SS'")
    hours, minutes, seconds = map(int, match.groups())
    return 3600.0 * hours + 60 * minutes + seconds


def _check_count(name: str, value: Any, may_be_none: bool, wrong_kinds: list[str], wrong_values: list[str]) -> None:
    if value is None and may_be_none:
        return
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        shown = repr(value) if len(repr(value)) <= _LONGEST_SHOWN else "an object"
        is_data = name == "num_epochs" and hasattr(value, "__len__") and not isinstance(value, str)
        hint = ". Inputs and targets are one dataset: `train((inputs, targets), num_epochs)`" if is_data else ""
        wrong_kinds.append(f"`{name}` is {shown} ({type(value).__name__}): pass a whole number of at least 1{hint}")
    elif value < 1:
        wrong_values.append(f"`{name}` is {value}, but it must be at least 1: pass 1 or more")


def _check_limit(name: str, value: Any, wrong_kinds: list[str], wrong_values: list[str]) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        wrong_kinds.append(f"`{name}` is {value!r} ({type(value).__name__}): pass a number, or None for no clipping")
    elif not 0 < float(value) < math.inf:
        wrong_values.append(f"`{name}` is {value}, which would remove the gradient: pass a number above 0, or None")


def check_run_arguments(*, collate_fn: Any, resume_from: Any = None, **loader_kwargs: Any) -> None:
    """Reject arguments of a run that have the wrong type; the keywords in `loader_kwargs` are names of arguments."""
    wrong_kinds = [
        f"`{name}` is {value!r} ({type(value).__name__}): pass a dict of arguments for torch's DataLoader"
        for name, value in loader_kwargs.items()
        if value is not None and not (isinstance(value, Mapping) and all(isinstance(key, str) for key in value))
    ]
    if collate_fn is not None and not callable(collate_fn):
        wrong_kinds.append(
            f"`collate_fn` is {collate_fn!r}, which is not callable: pass a function of a list of samples"
        )
    if resume_from is not None and not isinstance(resume_from, (str, os.PathLike)):
        wrong_kinds.append(f"`resume_from` is {resume_from!r}: pass the path of a state or of a folder of states")
    if wrong_kinds:
        raise ArgumentTypeError("; ".join(wrong_kinds) + ".")


def check_parts(*, model: Any, loss_func: Any, run_history: Any, seed: Any, compile_model: Any) -> None:
    """Reject arguments of the trainer that cannot work, apart from the optimizer. All complaints come in one error."""
    wrong_kinds: list[str] = []
    if not callable(model) or isinstance(model, type):
        wrong_kinds.append(f"`model` is {model!r}, which is not a module: pass an instance of nn.Module")
    if loss_func is not None and (not callable(loss_func) or isinstance(loss_func, type)):
        wrong_kinds.append(
            f"`loss_func` is {loss_func!r}, which does not take outputs and targets: pass a function or an instance "
            "of a loss module, or None if the model returns its loss"
        )
    if not isinstance(run_history, RunHistory):
        wrong_kinds.append(f"`run_history` is {run_history!r}: pass an instance of a subclass of RunHistory, or None")
    if seed is not None and (isinstance(seed, bool) or not isinstance(seed, numbers.Integral)):
        wrong_kinds.append(f"`seed` is {seed!r} ({type(seed).__name__}): pass a whole number, or None")
    if not isinstance(compile_model, (bool, Mapping)):
        wrong_kinds.append(f"`compile_model` is {compile_model!r}: pass a bool, or a dict of `torch.compile` arguments")
    if wrong_kinds:
        raise ArgumentTypeError("; ".join(wrong_kinds) + ".")


def returns_a_sum(loss_func: Any) -> bool:
    """Whether the attribute `reduction` of a loss function says that it returns the sum over a batch.

    A subclass of a torch loss with its own `forward` may do anything with that sum, so it is not judged.
    """
    while isinstance(loss_func, functools.partial):
        if "reduction" in loss_func.keywords:
            return bool(loss_func.keywords["reduction"] == "sum")
        loss_func = loss_func.func
    reduction = getattr(loss_func, "reduction", None)
    if not isinstance(reduction, str) or reduction != "sum":
        return False
    of_torch = [kind for kind in type(loss_func).__mro__ if kind.__module__.startswith("torch.nn.modules.loss")]
    return not of_torch or type(loss_func).forward is of_torch[0].forward  # type: ignore[attr-defined]


def check_reduction(loss_func: Any, *, hook: str) -> None:
    """Reject a loss function whose sums `hook` would pass on as means."""
    if returns_a_sum(loss_func):
        name = getattr(loss_func, "__name__", type(loss_func).__name__)
        if isinstance(loss_func, functools.partial):
            name = getattr(loss_func.func, "__name__", type(loss_func.func).__name__)
        raise ConfigurationError(
            f"`loss_func` is {name} with reduction='sum', but the loop expects the mean over a batch: with a sum, "
            "gradients and recorded losses would grow with the batch size and depend on how an update is split into "
            "batches and processes. Use reduction='mean'; to keep the size of the steps, multiply "
            f"the learning rate by the number of items that were summed over. Or override `{hook}`, divide there, and "
            "return the divisor as 'num_items_in_batch' if it is not the number of samples."
        )


def check_optimizer(optimizer: Any, modules: Iterable[Any], *, has_own_step: bool) -> None:
    """Reject an optimizer that cannot be stepped, or whose steps would change nothing.

    Args:
        optimizer: the run's optimizer.
        modules: the modules to train.
        has_own_step: whether the trainer's `optimizer_step` is overridden.
    """
    if isinstance(optimizer, type) or not hasattr(optimizer, "step"):
        raise ArgumentTypeError(
            f"`optimizer` is {optimizer!r}, which is not an optimizer. Pass an optimizer of the model's parameters, "
            "for example `torch.optim.AdamW(model.parameters())`."
        )
    if has_own_step:
        return
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ConfigurationError(
            "LBFGS evaluates the loss several times per update, through a closure that the loop cannot make for it. "
            "Use another optimizer, or override `optimizer_step` and pass it a closure there."
        )
    optimized = {id(parameter) for group in getattr(optimizer, "param_groups", ()) for parameter in group["params"]}
    trained = {id(parameter) for module in modules for parameter in module.parameters()}
    if optimized and trained and not optimized & trained:
        raise ConfigurationError(
            f"The optimizer has {len(optimized)} parameters, but none of them is among the {len(trained)} of the "
            "model, so training would change nothing. Create the optimizer after the model has its final form, with "
            "`model.parameters()`."
        )


def check_scheduler_factory(factory: Any, *, has_own_call: bool) -> None:
    """Reject a factory that cannot create a scheduler from the optimizer alone, as far as its signature shows.

    Args:
        factory: the `create_scheduler_fn`, or None.
        has_own_call: whether the trainer's `create_scheduler` is overridden and knows how to call it.
    """
    if factory is None:
        return
    if hasattr(factory, "step") and not isinstance(factory, type):
        raise ArgumentTypeError(
            f"`create_scheduler_fn` is a {type(factory).__name__}, which is already a scheduler. The trainer creates "
            "its scheduler when the run starts, with its own optimizer: pass a function of the optimizer, for "
            "example "
            f"`functools.partial({type(factory).__name__}, ...)` or `lambda optimizer: ...`."
        )
    if not callable(factory):
        raise ArgumentTypeError(
            f"`create_scheduler_fn` is {factory!r}, which is not callable. Pass a function that takes the optimizer "
            "and returns a scheduler."
        )
    if not has_own_call:
        _check_takes_optimizer(factory)


def _check_takes_optimizer(factory: Callable[..., Any]) -> None:
    made = factory.func if isinstance(factory, functools.partial) else factory
    name = getattr(made, "__name__", repr(made))
    try:
        inspect.signature(factory).bind(None)
    except ValueError:  # some functions in C have no readable signature
        return
    except TypeError as error:
        variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        parameters = [each for each in inspect.signature(factory).parameters.values() if each.kind not in variadic]
        missing = [parameter.name for parameter in parameters if parameter.default is parameter.empty][1:]
        if not missing:
            raise ArgumentTypeError(
                f"`create_scheduler_fn` is called with the optimizer, but {name} cannot be ({error}). Pass a function "
                "that takes the optimizer and returns a scheduler."
            ) from error
        remedy = f"functools.partial({name}, {', '.join(f'{argument}=...' for argument in missing)})"
        if hasattr(made, "create_scheduler_fn"):  # one of our classmethods, which knows where these come from
            remedy = f"{name}.create_scheduler_fn(...)"
        raise ArgumentTypeError(
            f"`create_scheduler_fn` is called with the optimizer alone, but {name} also needs "
            f"{', '.join(f'`{argument}`' for argument in missing)}. Pass `{remedy}`."
        ) from error


def check_scheduler(scheduler: Any, *, is_expected: bool, has_own_step: bool) -> None:
    """Reject a return value that is not a scheduler.

    Args:
        scheduler: the return value of `create_scheduler`.
        is_expected: whether None would mean that somebody forgot to return it.
        has_own_step: whether the trainer's `scheduler_step` is overridden and knows how to step it.
    """
    if scheduler is None and not is_expected:
        return
    if scheduler is None or not (has_own_step or callable(getattr(scheduler, "step", None))):
        raise HookOutputError(
            f"`create_scheduler_fn` or `create_scheduler` returned {scheduler!r}, which cannot be stepped as a "
            "scheduler. Return one with a method `step`, or override `scheduler_step` for another kind."
        )
