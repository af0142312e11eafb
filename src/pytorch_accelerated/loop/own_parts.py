"""`OwnParts`: the parts of a trainer whose class defines an attribute such as `model` itself, perhaps as a property."""

from __future__ import annotations

import inspect
from typing import Any

from pytorch_accelerated.loop.context import Asked, Context, Control, Parts, View

# The trainer's attributes that a subclass may define in its own way, by their names in `Parts`.
_MAY_BE_OWN = {
    "model": "model",
    "optimizer": "optimizer",
    "scheduler": "scheduler",
    "history": "run_history",
    "state": "run_state",
    "config": "run_config",
    "callbacks": "callback_handler",
}


def first_context(trainer: Any) -> Context:
    """The context of a new trainer. Attributes that its class defines itself, not as views, stay the trainer's own."""
    has_own = any(not _is_view(trainer, name) for name in _MAY_BE_OWN.values())
    return Context(trainer, trainer, Asked(), OwnParts(trainer) if has_own else Parts(), Control())


def _is_view(trainer: Any, name: str) -> bool:
    return isinstance(inspect.getattr_static(type(trainer), name), View)


def _own_or_kept(field: str) -> Any:
    """The trainer's attribute if its class defines it, else the value of the field."""
    name = _MAY_BE_OWN[field]

    def read(parts: OwnParts) -> Any:
        return vars(parts)[field] if _is_view(parts.trainer, name) else getattr(parts.trainer, name)

    def write(parts: OwnParts, value: Any) -> None:
        if _is_view(parts.trainer, name):
            vars(parts)[field] = value
        else:
            setattr(parts.trainer, name, value)

    return property(read, write)


class OwnParts(Parts):
    """The parts of a trainer whose class defines an attribute such as `model` itself.

    Attributes:
        trainer: has that attribute.
    """

    trainer: Any

    def __init__(self, trainer: Any) -> None:
        vars(self).update(vars(Parts()), trainer=trainer)

    model = _own_or_kept("model")
    optimizer = _own_or_kept("optimizer")
    scheduler = _own_or_kept("scheduler")
    history = _own_or_kept("history")
    state = _own_or_kept("state")
    config = _own_or_kept("config")
    callbacks = _own_or_kept("callbacks")
