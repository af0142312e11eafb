"""Public names of the trainer that a subclass may use for something else.

Scripts written before a name was added may use it for their own purposes, so nothing in this library reads those names.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any


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


def is_users_class(kind: type) -> bool:
    """Whether `kind` is not a class of this library."""
    return not kind.__module__.startswith("pytorch_accelerated.")
