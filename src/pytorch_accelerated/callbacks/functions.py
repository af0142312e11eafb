"""Functions as callbacks."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from pytorch_accelerated.errors import ConfigurationError
from pytorch_accelerated.facts.order import EVENTS
from pytorch_accelerated.facts.settings import check_positive_count
from pytorch_accelerated.loop.callback import TrainerCallback

if TYPE_CHECKING:
    from pytorch_accelerated.loop.callback import Trainer


class FunctionCallback(TrainerCallback):
    """Calls a function every n-th time that an event is fired; `on` makes it.

    The count begins with the run, and is saved in training states, so a resumed run continues it.

    >>> FunctionCallback(print, "on_train_epoch_end", every=2).state_key
    'print at on_train_epoch_end'

    Args:
        function: gets what a method of that name would get.
        event: its name.
        every: n.
    """

    recorded_names = None
    _calls = 0

    def __init__(self, function: Callable[..., Any], event: str, every: int) -> None:
        self.function, self.event, self.every = function, event, every
        setattr(self, event, self._count)

    @property
    def state_key(self) -> str:
        """The function and the event."""
        name = getattr(self.function, "__qualname__", type(self.function).__qualname__)  # of a partial, the class
        return f"{name} at {self.event}"

    def on_training_run_start(self, trainer: Trainer, **kwargs: Any) -> None:
        """Count from the start of a run that isn't resumed."""
        if trainer.run_state.updates == 0:
            self._calls = 0

    def state_dict(self) -> dict[str, Any]:
        """How often the event was fired."""
        return {"calls": self._calls}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue the count."""
        self._calls = state["calls"]

    def _count(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        self._calls += 1
        if self._calls % self.every == 0:
            self.function(trainer, *args, **kwargs)


def on(event: str, *, every: int = 1) -> Callable[[Callable[..., Any]], FunctionCallback]:
    """A decorator that makes a callback of a function: it is called every n-th time that the event is fired.

    ::

        @on("on_optimizer_step_end", every=100)
        def show_norm(trainer, **kwargs):
            trainer.print(trainer.get_model().weight.norm())

        trainer = Trainer(model, loss_func, optimizer, callbacks=[..., show_norm])

    Events are counted on each rank. Those of updates and epochs come on all of them, so that the function may talk to
    the other ranks; those of batches may not.

    Args:
        event: such as "on_optimizer_step_end", or an event that you fire yourself.
        every: n.

    Raises:
        ConfigurationError: for a name that isn't an event but resembles one, or `every` below 1.
    """
    check_positive_count("every", every)
    near = difflib.get_close_matches(event, EVENTS, n=1, cutoff=0.7)
    if event not in EVENTS and (near or not event.startswith("on_")):
        hint = f" Did you mean {near[0]!r}?" if near else " Names of events begin with 'on_'."
        raise ConfigurationError(f"`on` got {event!r}, which is not an event.{hint}")
    return lambda function: FunctionCallback(function, event, every)
