"""The arguments of `Trainer.train`, checked together before anything starts."""

from __future__ import annotations

import dataclasses
import functools
import math
import numbers
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from pytorch_accelerated.errors import ArgumentTypeError, ConfigurationError, HookOutputError
from pytorch_accelerated.facts.error_notes import described

_SMALLEST = {"rows": 0, "updates": 1}  # numbers that `leave_out` may name
# What a run can end after, instead of epochs: by the argument, the count of `RunState`.
LIMITS = {"max_num_train_steps": "updates", "max_samples": "samples", "max_tokens": "items"}
_CHOICES = {"step_scheduler": ("update", "epoch"), "nonfinite_policy": (None, "skip", "rollback")}


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainSettings:
    """The arguments of one training run. `Trainer.train` describes them.

    Integers are counts of at least 1, and plain floats are above 0.

    Raises:
        ArgumentTypeError: if a value has the wrong type.
        ConfigurationError: if a value cannot work.
    """

    num_epochs: int | None
    per_device_batch_size: int = 8
    eval_per_device_batch_size: int | None = None
    max_num_train_steps: int | None = None
    gradient_accumulation_steps: int = 1
    gradient_clip_value: float | None = None
    gradient_clip_norm: float | Mapping[str, float | None] | Sequence[float | None] | None = None
    max_duration: float | str | None = None
    step_scheduler: str = "update"
    scheduler_metric: str = "eval_loss_epoch"
    nonfinite_policy: str | None = None
    max_skipped_updates: int = 10
    overfit_batches: int | None = None
    record_every_n_steps: int | None = None
    detect_anomaly: bool = False
    leave_out: Mapping[str, Sequence[int]] | None = None
    max_samples: int | None = None
    max_tokens: int | None = None

    def __post_init__(self) -> None:
        # Numpy's numbers are accepted, but converted to Python's before they are saved and shown.
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.type == "int" or (field.type == "int | None" and value is not None):
                check_positive_count(field.name, value)
                object.__setattr__(self, field.name, int(value))
            elif field.type == "float | None" and value is not None:
                _check_is_above_0(field.name, value)
                object.__setattr__(self, field.name, float(value))
        limits: Any = self.gradient_clip_norm
        name = "gradient_clip_norm"
        if isinstance(limits, (Mapping, list, tuple)):
            named = limits if isinstance(limits, Mapping) else dict(enumerate(limits))
            given = {each: limit for each, limit in named.items() if limit is not None}
            for each, limit in given.items():
                _check_is_above_0(f"{name}[{each!r}]", limit)
            if not given:
                object.__setattr__(self, name, None)
        elif limits is not None:
            _check_is_above_0(name, limits)
            object.__setattr__(self, name, float(limits))
        if self.num_epochs is None and self.limit is None:
            raise ConfigurationError("`num_epochs` and `max_num_train_steps` are both None: set one or `max_samples`.")
        if sum(getattr(self, name) is not None for name in LIMITS) > 1:
            raise ConfigurationError(f"A run can end after only one of {', '.join(LIMITS)}: set one of them.")
        if self.gradient_clip_value is not None and self.gradient_clip_norm is not None:
            raise ConfigurationError(
                "`gradient_clip_value` and `gradient_clip_norm` would undo each other: set only one of them."
            )
        for name, words in _CHOICES.items():
            if getattr(self, name) not in words:
                raise ConfigurationError(f"`{name}` is {getattr(self, name)!r}: choose one of {words}.")
        if self.max_duration is not None:
            parse_duration(self.max_duration)
        if self.leave_out is not None:
            object.__setattr__(self, "leave_out", _checked_numbers(self.leave_out))

    @functools.cached_property
    def limit(self) -> str | None:
        """The argument, one of `LIMITS`, that ends the run instead of `num_epochs`; None if these do."""
        return next((name for name in LIMITS if getattr(self, name) is not None), None)

    @functools.cached_property
    def clips_gradients(self) -> bool:
        """Whether gradients are clipped."""
        return self.gradient_clip_value is not None or self.gradient_clip_norm is not None

    @property
    def max_seconds(self) -> float | None:
        """`max_duration` in seconds."""
        return None if self.max_duration is None else parse_duration(self.max_duration)


def check_positive_count(name: str, value: Any) -> None:
    """Reject a size or number that is not an integer of at least 1."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        is_data = name == "num_epochs" and hasattr(value, "__len__") and not isinstance(value, str)
        hint = " Inputs and targets are one dataset: `train((inputs, targets), num_epochs)`." if is_data else ""
        what = described(value) if is_data else f"{value!r:.80} ({type(value).__name__})"
        raise ArgumentTypeError(f"`{name}` is {what}: pass a whole number of at least 1.{hint}")
    if value < 1:
        raise ConfigurationError(f"`{name}` is {value}, but it must be at least 1: pass 1 or more.")


def parse_duration(duration: float | str) -> float:
    """The seconds in a number of seconds above 0, or in "HH:MM:SS".

    Raises:
        ConfigurationError: for anything else.
    """
    if isinstance(duration, numbers.Real) and not isinstance(duration, bool) and duration > 0:
        return float(duration)
    match = re.fullmatch(r"(\d+):([0-5]\d):([0-5]\d)", duration) if isinstance(duration, str) else None
    if match is None:
        raise ConfigurationError(f"`max_duration` is {duration!r}: pass a number of seconds above 0, or 'HH:MM:SS'.")
    hours, minutes, seconds = map(int, match.groups())
    return 3600.0 * hours + 60 * minutes + seconds


def _checked_numbers(leave_out: Any) -> dict[str, list[int]]:
    """The sorted numbers of rows and updates in `leave_out`."""
    named = leave_out if isinstance(leave_out, Mapping) and set(leave_out) <= _SMALLEST.keys() else {"rows": None}
    found: dict[str, Any] = {kind: named.get(kind, ()) for kind in _SMALLEST}
    for kind, numbers_of_kind in found.items():
        for number in numbers_of_kind if isinstance(numbers_of_kind, Iterable) else (None,):
            if isinstance(number, bool) or not isinstance(number, numbers.Integral) or number < _SMALLEST[kind]:
                raise ArgumentTypeError(
                    f"`leave_out` is {leave_out!r:.80}, but whole numbers may be those of rows, from 0, or of updates, "
                    'from 1. Pass a dict that says which: `{"rows": [...]}`, `{"updates": [...]}` or both.'
                )
    return {kind: sorted({int(number) for number in numbers_of_kind}) for kind, numbers_of_kind in found.items()}


def _check_is_above_0(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise ArgumentTypeError(
            f"`{name}` is {value!r} ({type(value).__name__}): pass a number above 0, or None to do without."
        )
    if not 0 < float(value) < math.inf:
        raise ConfigurationError(f"`{name}` is {value}, but must be above 0 and finite: pass such a number or None.")


def check_parts(model: Any, loss_func: Any) -> None:
    """Reject a model or loss function that is a class instead of an instance, or cannot be called."""
    if not callable(model) or isinstance(model, type):
        raise ArgumentTypeError(f"`model` is {model!r}, which is not a module: pass an instance of nn.Module.")
    if loss_func is not None and (not callable(loss_func) or isinstance(loss_func, type)):
        raise ArgumentTypeError(
            f"`loss_func` is {loss_func!r}: pass a function, an instance of a loss module, or None for the model's own."
        )


def _returns_a_sum(loss_func: Any) -> bool:
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
    if _returns_a_sum(loss_func):
        made = loss_func.func if isinstance(loss_func, functools.partial) else loss_func
        name = getattr(made, "__name__", type(made).__name__)
        raise ConfigurationError(
            f"`loss_func` is {name} with reduction='sum', but the loop expects the mean over a batch: a sum depends on "
            f"how an update is split. Use reduction='mean' and a larger learning rate, or override `{hook}`, divide "
            "there, and return the divisor as 'num_items_in_batch' if it is not the number of samples."
        )


def check_optimizer(optimizer: Any, owned: Iterable[torch.Tensor], *, has_own_step: bool) -> None:
    """Reject an optimizer that cannot be stepped, or whose steps would change nothing.

    Args:
        optimizer: the run's optimizer.
        owned: the tensors of the model and of what else the trainer holds.
        has_own_step: whether the trainer's `optimizer_step` is overridden.
    """
    if type(optimizer).__name__ == "DummyOptim":  # accelerate's, for one that DeepSpeed's config describes
        return
    if isinstance(optimizer, type) or not hasattr(optimizer, "step"):
        raise ArgumentTypeError(
            f"`optimizer` is {optimizer!r}: pass an optimizer, such as `torch.optim.AdamW(model.parameters())`."
        )
    if has_own_step:
        return
    optimized = {id(parameter) for group in getattr(optimizer, "param_groups", ()) for parameter in group["params"]}
    known = {id(each) for each in owned}
    if optimized and known and not optimized & known:
        raise ConfigurationError(
            f"None of the {len(optimized)} parameters of the optimizer is among the {len(known)} tensors of model and "
            "trainer, so training would change nothing. Make the optimizer last, with `model.parameters()`."
        )


def check_scheduler_factory(factory: Any) -> None:
    """Reject a `create_scheduler_fn` that cannot be called."""
    factories = factory.values() if isinstance(factory, Mapping) else factory
    for one in factories if isinstance(factory, (list, tuple, Mapping)) else [factory]:
        if one is not None and not callable(one):
            raise ArgumentTypeError(f"`create_scheduler_fn` is {factory!r}: pass a function that takes the optimizer.")


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
