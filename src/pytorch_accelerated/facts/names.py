"""Public names of the trainer: those that a subclass may use for something else, and arguments by their other names.

Scripts written before a name was added may use it for their own purposes, so nothing in this library reads those names.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar

from pytorch_accelerated.errors import ArgumentTypeError, MissingMethodError

P = ParamSpec("P")
Result = TypeVar("Result")

# Arguments of Keras, Lightning, fastai and transformers that other arguments of ours resemble more, or none.
_ARGUMENTS_ELSEWHERE = {
    "criterion": "loss_func",
    "max_steps": "max_num_train_steps",
    "scheduler": "create_scheduler_fn",
    "tokenizer": "processing_class",  # its name in older versions of transformers
    "val_data": "eval_dataset",
    "validation_data": "eval_dataset",
}
_METHODS_ELSEWHERE = {
    "fit": "train",
    "validate": "evaluate",
    "test": "evaluate",
    "save": "save_checkpoint",
    "save_model": "save_checkpoint",
    "load": "load_checkpoint",
    "history": "run_history",
}


@dataclasses.dataclass
class GivenArguments:
    """Arguments of the trainer's constructor, by which the trainer goes; see `Trainer`."""

    seed: int | None
    mixed_precision: str | None
    compile_model: bool | Mapping[str, Any]
    accelerator: Any  # or a function that returns one
    inference_mode: bool
    timeout: float | None
    lanes: int | None = None


class GivenArgument:
    """Reads and sets an argument of the constructor.

    In a subclass of the user's, whatever the subclass defines or assigns under the name is its own.
    """

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, trainer: Any, kind: type | None = None) -> Any:
        if trainer is None:
            return self
        own = vars(trainer)
        return own[self._name] if self._name in own else getattr(trainer.run_context.asked.given, self._name)

    def __set__(self, trainer: Any, value: Any) -> None:
        if is_users_class(type(trainer)):
            vars(trainer)[self._name] = value
        else:
            setattr(trainer.run_context.asked.given, self._name, value)


class Replaceable:
    """A property that a subclass, or an assignment, may replace by anything.

    Args:
        read: returns the value for a trainer.
    """

    def __init__(self, read: Callable[[Any], Any]) -> None:
        self._read = read
        self.__doc__ = read.__doc__

    def __get__(self, trainer: Any, kind: type | None = None) -> Any:
        return self if trainer is None else self._read(trainer)


def knows_other_names(method: Callable[P, Result]) -> Callable[P, Result]:
    """Decorator: an unknown keyword argument is an error that names the one that was probably meant."""
    known = inspect.signature(method).parameters

    @functools.wraps(method)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> Result:
        for name in kwargs.keys() - known.keys():
            near = [_ARGUMENTS_ELSEWHERE.get(name), *difflib.get_close_matches(name, known, n=1)]
            meant = next((each for each in near if each in known), None)
            is_rate = name in ("lr", "learning_rate") and "args" not in known
            of_optimizer = " It is an argument of the optimizer." if is_rate else ""
            hint = f" Use `{meant}`." if meant and not of_optimizer else of_optimizer
            raise ArgumentTypeError(f"`{type(args[0]).__name__}.{method.__name__}` has no argument `{name}`.{hint}")
        return method(*args, **kwargs)

    return wrapper


def refuse_method_of_others(trainer: Any, name: str) -> None:
    """Raise a MissingMethodError, an AttributeError, if other libraries call a method of the trainer `name`."""
    if name in _METHODS_ELSEWHERE:
        raise MissingMethodError(f"`{type(trainer).__name__}` has no `{name}`. Use `{_METHODS_ELSEWHERE[name]}`.")


def is_users_class(kind: type) -> bool:
    """Whether `kind` is not a class of this library."""
    return not kind.__module__.startswith("pytorch_accelerated.")
