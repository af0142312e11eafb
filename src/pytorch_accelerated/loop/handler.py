"""Handlers of callbacks, which call only the methods that do something."""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, TypeVar

from pytorch_accelerated.errors import (
    ArgumentTypeError,
    CallbackMethodNotImplementedError,
    DuplicateCallbackError,
    StopTrainingError,
)
from pytorch_accelerated.facts.order import EVENTS, EVENTS_OF_UPDATE
from pytorch_accelerated.loop.callback import TrainerCallback
from pytorch_accelerated.record.warning import stacklevel_of_user
from pytorch_accelerated.states.training_state import key_of_state

Value = TypeVar("Value")


def instance_of(callback: Any, events: Iterable[str]) -> Any:
    """The instance of a callback, which may be given as a class.

    Raises:
        ArgumentTypeError: if the callback has no method that is named like one of `events`.
    """
    instance = callback() if isinstance(callback, type) else callback
    if not any(callable(getattr(instance, event, None)) for event in events):
        raise ArgumentTypeError(
            f"{callback!r} is not a callback: none of its methods is named like an event. Pass a TrainerCallback."
        )
    return instance


def unknown_events(callback: Any, events: Collection[str], cutoff: float = 0.8) -> Iterator[tuple[str, str]]:
    """The methods of `callback` that no event will call, each with a hint at the event that was probably meant.

    Names that resemble no event belong to events that users fire themselves.
    """
    for name in dir(type(callback)):
        if name.startswith("on_") and name not in events and callable(getattr(type(callback), name)):
            for event in difflib.get_close_matches(name, events, n=1, cutoff=cutoff):
                yield name, f" Did you mean {event!r}?"


class CallbackHandler:
    """Holds the callbacks of a trainer, in the order given, and calls them with the trainer and keyword arguments.

    Args:
        callbacks: instances, or classes that can be made without arguments.
        custom_events: names of events that the trainer fires besides the built-in ones.

    Attributes:
        acts_at: by event, whether firing it does anything. This look-up is the whole cost of idle callbacks.

    Raises:
        ArgumentTypeError: for anything that is not a callback.
        DuplicateCallbackError: if two callbacks have the same `TrainerCallback.state_key`.
    """

    def __init__(self, callbacks: Iterable[Any] = (), custom_events: Iterable[str] = ()) -> None:
        self._known_events = frozenset({*EVENTS, *custom_events})
        self._callbacks: list[Any] = []
        self._methods = ByEvent(self.acting_methods)
        self.acts_at = ByEvent(self._acts_at)
        self.add_callbacks(callbacks)

    def add_callback(self, callback: Any) -> None:
        """Add a callback, an instance or a class, at the end.

        Raises:
            ArgumentTypeError: if the callback has no method that is named like an event.
        """
        instance = instance_of(callback, self._known_events)
        kind = type(instance)
        if vars(kind).get("counts_once") and any(type(other) is kind for other in self):
            return
        _refuse_callback_of_transformers(instance)
        key = key_of_state(instance)
        if key in map(key_of_state, self._callbacks):
            raise DuplicateCallbackError(
                f"There is already a callback with the state key {key!r}. Join the two into one, or give each its own "
                "`state_key`, in a subclass."
            )
        for name, hint in unknown_events(instance, self._known_events):
            warnings.warn(
                f"{type(instance).__name__}.{name} will never be called by the training loop: no event has that "
                f"name.{hint} If you fire it yourself, list it in the trainer's class attribute `custom_events`.",
                stacklevel=stacklevel_of_user(),
            )
        self._callbacks.append(instance)
        self._forget_methods()

    def add_callbacks(self, callbacks: Iterable[Any]) -> None:
        """Add multiple callbacks at the end, in their order."""
        for callback in callbacks:
            self.add_callback(callback)

    def clear_callbacks(self) -> None:
        """Remove all callbacks."""
        self._callbacks.clear()
        self._forget_methods()

    @property
    def callback_list(self) -> list[str]:
        """The names of the callback classes."""
        return [type(callback).__name__ for callback in self._callbacks]

    @property
    def callbacks(self) -> tuple[Any, ...]:
        """The callbacks, in order. Assign others, or use `add_callback`, to change them."""
        return tuple(self._callbacks)

    @callbacks.setter
    def callbacks(self, callbacks: Iterable[Any]) -> None:
        callbacks = list(callbacks)
        self.clear_callbacks()
        self.add_callbacks(callbacks)

    def __iter__(self) -> Iterator[Any]:
        return iter(tuple(self._callbacks))

    def __len__(self) -> int:
        return len(self._callbacks)

    def call_event(self, event: str, *args: Any, **kwargs: Any) -> None:
        """Call the method named `event` of every callback that has one, in order.

        A `StopTrainingError` is raised again when all callbacks have been called; any other exception ends the event.
        """
        stop: StopTrainingError | None = None
        for method in self._methods[event]:
            try:
                method(*args, **kwargs)
            except StopTrainingError as error:
                stop = stop or error
            except CallbackMethodNotImplementedError:
                continue
        if stop is not None:
            raise stop

    def acting_methods(self, event: str) -> list[Callable[..., Any]]:
        """The bound methods that `event` will call: those that are not the empty ones of `TrainerCallback`."""
        methods = [getattr(callback, event, None) for callback in self._callbacks]
        empty = getattr(TrainerCallback, event, None)
        return [each for each in methods if callable(each) and getattr(each, "__func__", each) is not empty]

    def ranks_agree_after_each_update(self) -> bool:
        """Whether something on this rank may ask to stop at an event of an update, as the callbacks declare."""
        owners = (getattr(method, "__self__", None) for event in EVENTS_OF_UPDATE for method in self._methods[event])
        return self._hears_everything or any(map(needs_agreement, owners))

    @property
    def _hears_everything(self) -> bool:
        """Whether a subclass overrides `call_event`, so that every event must be fired."""
        return type(self).call_event is not CallbackHandler.call_event

    def _acts_at(self, event: str) -> bool:
        return self._hears_everything or bool(self._methods[event])

    def _forget_methods(self) -> None:
        self._methods.clear()
        self.acts_at.clear()


class ByEvent(dict[str, Value]):
    """Values by event, each computed when it is first needed."""

    def __init__(self, find: Callable[[str], Value]) -> None:
        self._find = find

    def __missing__(self, event: str) -> Value:
        value = self[event] = self._find(event)
        return value


def needs_agreement(callback: Any) -> bool:
    """The value of `ranks_agree_after_each_update` in the very class of `callback`; True if that class has none."""
    return bool(vars(type(callback)).get("ranks_agree_after_each_update", True))


def _refuse_callback_of_transformers(callback: Any) -> None:
    """Refuse a callback for the Trainer of `transformers`, or for ours that is called in the same way."""
    bases = {base.__name__ for base in type(callback).__mro__}
    if not isinstance(callback, TrainerCallback) and "TrainerCallback" in bases and hasattr(callback, "on_log"):
        raise ArgumentTypeError(
            f"{type(callback).__name__} is for the Trainer of `pytorch_accelerated.huggingface` or transformers. This "
            "one has the events of `pytorch_accelerated.callbacks.TrainerCallback`; for trackers, use TrackerCallback."
        )
