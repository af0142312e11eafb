"""Placeholders for numbers that are known only when a run starts."""

from __future__ import annotations

import dataclasses
import enum
import functools
import math
import numbers
import operator
from collections.abc import Callable
from fractions import Fraction
from typing import Any, NoReturn, TypeVar

from torch.optim.lr_scheduler import OneCycleLR

from pytorch_accelerated.errors import ArgumentTypeError, ConfigurationError
from pytorch_accelerated.facts.accumulation import Accumulation
from pytorch_accelerated.facts.trees import map_leaves, plain_parts_of
from pytorch_accelerated.run_config import TrainerRunConfig

T = TypeVar("T")
_Method = Callable[["Placeholder", object], "Placeholder"]


def _operator(symbol: str) -> tuple[_Method, _Method]:
    """The methods of an operator for the number on its left and for that on its right."""
    return lambda left, right: _operation(symbol, left, right), lambda right, left: _operation(symbol, left, right)


class Placeholder:
    """A number that is filled in when a run starts.

    ``+ - * / //`` and the unary minus work with numbers and other placeholders on either side, and may be chained; the
    result is a new placeholder. Integers stay integers under ``+ - * //``; ``/`` gives a float.

    Raises:
        ArgumentTypeError: (a TypeError) if it is compared or used as a number before the run has started.
    """

    __slots__ = ()

    __add__, __radd__ = _operator("+")
    __sub__, __rsub__ = _operator("-")
    __mul__, __rmul__ = _operator("*")
    __truediv__, __rtruediv__ = _operator("/")
    __floordiv__, __rfloordiv__ = _operator("//")

    def __neg__(self) -> Placeholder:
        return 0 - self

    def _refuse(self, *_: object) -> NoReturn:
        raise ArgumentTypeError(
            f"{_text(self)} has no value before a run starts, so it cannot be compared or used as a number yet. Use "
            "it, with + - * / //, in a functools.partial that you pass as create_scheduler_fn, or use a number."
        )

    __bool__ = __int__ = __float__ = __index__ = __round__ = __trunc__ = __floor__ = __ceil__ = _refuse
    __lt__ = __le__ = __gt__ = __ge__ = _refuse


class TrainerPlaceholderValues(Placeholder, enum.Enum):
    """The numbers known at the start of a run. A step is an optimizer update; its number is the same on every rank.

    A training stream without a length has no updates per epoch. With ``max_num_train_steps``, the whole run then counts
    as one epoch: `NUM_EPOCHS` is 1, the other training values count the whole run, and
    ``NUM_EPOCHS * NUM_UPDATE_STEPS_PER_EPOCH`` is its length. Without it, these values raise a `ConfigurationError`.

    The product is also the length of the run for sized data if ``max_num_train_steps`` ends it within an epoch.
    `NUM_EPOCHS` alone is the number of epochs that are started. In arithmetic it is the exact number, for example 2.5,
    so that ``0.1 * NUM_EPOCHS * NUM_UPDATE_STEPS_PER_EPOCH`` is a tenth of the run, and so it is for this library's
    schedulers, which take fractions. Another function that receives the two separately gets whole numbers; for
    `OneCycleLR`, which would multiply them to a longer run, that is an error.

    Each value names the field of `TrainerRunConfig` that the number is read from.
    """

    #: Number of epochs that will be started.
    NUM_EPOCHS = "num_epochs"
    #: Updates per epoch.
    NUM_UPDATE_STEPS_PER_EPOCH = "num_update_steps_per_epoch"
    #: Batches of one rank per training epoch.
    TRAIN_DATALOADER_LEN = "train_dataloader_len"
    #: Batches of one rank per evaluation.
    EVAL_DATALOADER_LEN = "eval_dataloader_len"
    #: The same as `NUM_UPDATE_STEPS_PER_EPOCH`, since an update is an update on every rank.
    PER_PROCESS_NUM_UPDATE_STEPS_PER_EPOCH = "num_local_update_steps_per_epoch"

    @classmethod
    def placeholder_set(cls) -> set[str]:
        """The names of all placeholders."""
        return {placeholder.name for placeholder in cls}


def replace_trainer_placeholder_values(trainer: Any, instance: Callable[..., T]) -> Callable[..., T]:
    """`instance` with placeholders replaced by the numbers of the trainer's run.

    Args:
        trainer: a trainer whose run has started; only its `run_config` is read.
        instance: a `functools.partial` with placeholders among its positional and keyword values, also inside tuples,
            lists, dicts and further partials. It is not changed. Any other callable is returned as it is.

    Raises:
        ConfigurationError: if there is no run yet, or the run has no number for one of the placeholders.
    """
    if not isinstance(instance, functools.partial):
        return instance
    if trainer.run_config is None:
        raise ConfigurationError(
            "Placeholders cannot be replaced before a run. Do it in `Trainer.create_scheduler` or later."
        )
    resolved: Callable[..., T] = _resolve(instance, trainer.run_config)
    return resolved


_OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": lambda left, right: _as_float(left) / _as_float(right),
    "//": operator.floordiv,
}


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class _Operation(Placeholder):
    """An operation on two numbers, one or both still unknown."""

    symbol: str
    left: Any
    right: Any

    def __repr__(self) -> str:
        return _text(self)


def _operation(symbol: str, left: object, right: object) -> Placeholder:
    if all(isinstance(operand, (Placeholder, numbers.Real)) for operand in (left, right)):
        return _Operation(symbol, left, right)
    return NotImplemented  # type: ignore[no-any-return]  # Python turns it into a TypeError that names both types


def _text(value: object) -> str:
    """`value` as Python source."""
    if isinstance(value, TrainerPlaceholderValues):
        return value.name
    if not isinstance(value, _Operation):
        return str(value)
    operands = [
        f"({_text(each)})" if isinstance(each, _Operation) else _text(each) for each in (value.left, value.right)
    ]
    return f" {value.symbol} ".join(operands)


_PER_EPOCH = (
    TrainerPlaceholderValues.NUM_UPDATE_STEPS_PER_EPOCH,
    TrainerPlaceholderValues.PER_PROCESS_NUM_UPDATE_STEPS_PER_EPOCH,
    TrainerPlaceholderValues.TRAIN_DATALOADER_LEN,
)


def _resolve(value: Any, run_config: TrainerRunConfig) -> Any:
    # Plain containers only: it is unknown how to rebuild a subclass.
    return map_leaves(lambda leaf: _resolve_leaf(leaf, run_config), value, parts=plain_parts_of)


def _resolve_leaf(value: Any, run_config: TrainerRunConfig) -> Any:
    if isinstance(value, TrainerPlaceholderValues):
        return _number(value, run_config)
    if isinstance(value, _Operation):
        number = _calculate(value, run_config)
        return math.ceil(number) if isinstance(number, Fraction) else number
    if isinstance(value, functools.partial):
        parts: Any = [value.func, value.args, value.keywords]
        exact = _exact_epochs(run_config)
        if isinstance(exact, Fraction) and _receives_both(value):
            if isinstance(value.func, type) and issubclass(value.func, OneCycleLR):
                raise ConfigurationError(
                    f"{value.func.__name__} would multiply NUM_EPOCHS by the updates per epoch, but the run ends in an "
                    f"epoch, after {run_config.max_num_train_steps} updates of {run_config.num_update_steps_per_epoch} "
                    "per epoch. Pass `total_steps=NUM_EPOCHS * NUM_UPDATE_STEPS_PER_EPOCH` instead of the two."
                )
            if hasattr(value.func, "create_scheduler_fn"):  # ours take a part of an epoch
                epochs = float(exact)
                parts = map_leaves(lambda leaf: epochs if _is_num_epochs(leaf) else leaf, parts, parts=plain_parts_of)
        func, args, keywords = _resolve(parts, run_config)
        return functools.partial(func, *args, **keywords)
    return value


def _calculate(value: Any, run_config: TrainerRunConfig) -> Any:
    """The value of an expression, with the exact number of epochs."""
    if isinstance(value, _Operation):
        return _OPERATORS[value.symbol](_calculate(value.left, run_config), _calculate(value.right, run_config))
    return _exact_epochs(run_config) if _is_num_epochs(value) else _resolve(value, run_config)


def _is_num_epochs(value: object) -> bool:
    return value is TrainerPlaceholderValues.NUM_EPOCHS


def _exact_epochs(run_config: TrainerRunConfig) -> int | Fraction:
    """The exact number of epochs: a fraction if ``max_num_train_steps`` ends the run within one."""
    updates, per_epoch = run_config.max_num_train_steps, run_config.num_update_steps_per_epoch
    if not updates or not per_epoch or updates % per_epoch == 0:
        return _number(TrainerPlaceholderValues.NUM_EPOCHS, run_config)
    return Fraction(updates, per_epoch)


def _receives_both(instance: functools.partial[Any]) -> bool:
    """Whether a function receives the number of epochs and one per epoch unchanged."""
    given = [*instance.args, *instance.keywords.values()]
    return any(map(_is_num_epochs, given)) and any(value is each for value in given for each in _PER_EPOCH)


def _as_float(number: Any) -> Any:
    """Fractions divide to fractions, but placeholders promise a float."""
    return float(number) if isinstance(number, Fraction) else number


def _number(placeholder: TrainerPlaceholderValues, run_config: TrainerRunConfig) -> int:
    number: int | None = getattr(run_config, placeholder.value)
    updates = run_config.max_num_train_steps
    if run_config.num_update_steps_per_epoch is None and updates is not None:
        # A stream with a known number of steps: the run counts as one epoch.
        batches = Accumulation.of(run_config).batches(updates)
        of_run = {**dict.fromkeys(_PER_EPOCH, updates), TrainerPlaceholderValues.TRAIN_DATALOADER_LEN: batches}
        number = {**of_run, TrainerPlaceholderValues.NUM_EPOCHS: 1}.get(placeholder, number)
    if number is None:
        raise ConfigurationError(
            f"TrainerPlaceholderValues.{placeholder.name} has no value in this run, whose length is unknown. Pass "
            "max_num_train_steps to Trainer.train, not max_tokens, or data with a length, or use a number instead."
        )
    return number
