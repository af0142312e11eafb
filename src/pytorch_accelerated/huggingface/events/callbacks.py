"""Callbacks, with the arguments ``args, state, control``."""

from __future__ import annotations

import dataclasses
import math
import sys
import warnings
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from pytorch_accelerated.callbacks.base import TrainerCallback as NativeCallback
from pytorch_accelerated.callbacks.handler import EventHandler, needs_agreement
from pytorch_accelerated.callbacks.warning import stacklevel_of_user
from pytorch_accelerated.errors import ArgumentTypeError, CallbackSetupError
from pytorch_accelerated.huggingface.arguments.strategies import IntervalStrategy, SaveStrategy
from pytorch_accelerated.huggingface.events.state import CONTROL_FLAGS, ExportableState
from pytorch_accelerated.processes.ranks import Ranks
from pytorch_accelerated.progress.formats import format_count
from pytorch_accelerated.progress.screen import show

if TYPE_CHECKING:
    from pytorch_accelerated.huggingface.trainer import Trainer

_OURS = __name__.partition(".")[0]


class TrainerCallback:
    """Watches a run. Override the events you need; the others cost nothing.

    Every event is called on every process with the arguments, the state and the control of the run. `model`,
    `processing_class`, `optimizer`, `lr_scheduler`, `train_dataloader`, `eval_dataloader` and the values of the event
    are keyword arguments; accept ``**kwargs``. Set flags of the control to request something. A returned control
    replaces it for the callbacks that follow.
    """

    #: Whether all processes agree after each update on the flags that this callback set, which costs a message. Set it
    #: to False for callbacks that set the same flags on each. A subclass does not inherit the False.
    ranks_agree_after_each_update: bool = True

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """The trainer has been made."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """A training begins."""

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """A training is over, and the best weights have been loaded, if requested."""

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """An epoch begins."""

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """An epoch is over."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """The first batch of an update comes next."""

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """A batch that is not the last one of its update has been used."""

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """The gradients of an update are complete and clipped."""

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """The parameters have been changed; the gradients are still there."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """An update is over."""

    def on_prediction_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """A batch has been evaluated or predicted."""

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """An evaluation is over; its `metrics` are a keyword argument."""

    def on_predict(self, args: Any, state: Any, control: Any, metrics: Any, **kwargs: Any) -> Any:
        """A prediction is over."""

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """A checkpoint has been saved."""

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """Something was logged; the `logs` are a keyword argument."""

    def on_push_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """Nothing is uploaded, so this is for callbacks that call it themselves."""


EVENTS: tuple[str, ...] = tuple(name for name in vars(TrainerCallback) if name.startswith("on_"))
# Methods for these are not looked up each time.
_FREQUENT_EVENTS = frozenset(
    f"on_{moment}"
    for moment in ("step_begin", "substep_end", "pre_optimizer_step", "optimizer_step", "step_end", "prediction_step")
)

# Flags of the control that are cleared when an event begins: fulfilled, or about to be decided again.
_CLEARED_AT = {
    "on_train_begin": ("should_training_stop",),
    "on_epoch_begin": ("should_epoch_stop",),
    "on_step_begin": ("should_save", "should_evaluate", "should_log"),
    "on_save": ("should_save",),
    "on_evaluate": ("should_evaluate",),
    "on_log": ("should_log",),
}

# The values of an event that `CallbackHandler` may be given by position.
_VALUES = {"on_evaluate": "metrics", "on_predict": "metrics", "on_log": "logs"}


def _fires(event: str) -> Callable[..., Any]:
    """The method of `CallbackHandler` for `event`."""

    def method(self: CallbackHandler, args: Any, state: Any, control: Any, *values: Any, **named: Any) -> Any:
        positional = dict(zip([_VALUES[event]] if event in _VALUES else [], values, strict=True))
        return self.fire(event, args, state, control, **positional, **named)

    method.__name__, method.__doc__ = event, getattr(TrainerCallback, event).__doc__
    return method


class CallbackHandler(EventHandler):
    """Holds the callbacks of a trainer, in the order given, and calls them with ``args, state, control``.

    Callbacks may be genuine ones of `transformers`, or any objects with methods named like events. All attributes but
    the callbacks are handed to these.

    Args:
        callbacks: instances, or classes that can be made without arguments.
    """

    def __init__(
        self, callbacks: Iterable[Any], model: Any, processing_class: Any, optimizer: Any, lr_scheduler: Any
    ) -> None:
        super().__init__(TrainerCallback, EVENTS)
        self.model = model
        self.processing_class = processing_class
        self.optimizer = optimizer
        self.lr_scheduler = lr_scheduler
        self.train_dataloader: Any = None  # until there is one
        self.eval_dataloader: Any = None
        self._known_callbacks: list[Any] = []
        self._agrees = False
        for callback in callbacks:
            self.add_callback(callback)

    @property
    def callbacks(self) -> list[Any]:
        """The instances. The list may be changed at any time."""
        return self._callbacks

    @callbacks.setter
    def callbacks(self, callbacks: list[Any]) -> None:
        self._callbacks = callbacks

    @property
    def callback_list(self) -> str:
        """The names of the callbacks' classes, a line each."""
        return "\n".join(type(callback).__name__ for callback in self.callbacks)

    def pop_callback(self, callback: Any) -> Any:
        """Remove the first callback of a class, or this very instance, and return it; None if there is none.

        A class of `transformers` also finds ours of the same name, and the other way round: they do the same job.
        """
        for is_meant in (
            lambda present: type(present) is callback or present is callback,
            lambda present: isinstance(callback, type) and _job(type(present)) == _job(callback),
        ):
            for index, present in enumerate(self.callbacks):
                if is_meant(present):
                    return self.callbacks.pop(index)
        return None

    def remove_callback(self, callback: Any) -> None:
        """Do what `pop_callback` does, without returning anything."""
        self.pop_callback(callback)

    def listens_to(self, event: str) -> bool:
        """Whether any callback does something at `event`."""
        return bool(self._methods_now(event))

    def ranks_agree_after_each_update(self) -> bool:
        """Whether some callback may set a flag of the control at any time, as the callbacks declare."""
        self._notice_changes()
        return self._agrees

    def call_event(self, event: str, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """Call all callbacks in their order, and return the control that they leave."""
        for method in self._methods_now(event):
            result = method(
                args,
                state,
                control,
                model=self.model,
                processing_class=self.processing_class,
                optimizer=self.optimizer,
                lr_scheduler=self.lr_scheduler,
                train_dataloader=self.train_dataloader,
                eval_dataloader=self.eval_dataloader,
                **kwargs,
            )
            if result is not None:
                control = result
        return control

    def fire(self, event: str, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """Do what the method named like `event` does: clear flags of the control, then `call_event`."""
        for flag in _CLEARED_AT.get(event, ()):
            setattr(control, flag, False)
        return self.call_event(event, args, state, control, **kwargs)

    on_init_end = _fires("on_init_end")
    on_train_begin = _fires("on_train_begin")
    on_train_end = _fires("on_train_end")
    on_epoch_begin = _fires("on_epoch_begin")
    on_epoch_end = _fires("on_epoch_end")
    on_step_begin = _fires("on_step_begin")
    on_substep_end = _fires("on_substep_end")
    on_pre_optimizer_step = _fires("on_pre_optimizer_step")
    on_optimizer_step = _fires("on_optimizer_step")
    on_step_end = _fires("on_step_end")
    on_prediction_step = _fires("on_prediction_step")
    on_evaluate = _fires("on_evaluate")
    on_predict = _fires("on_predict")
    on_save = _fires("on_save")
    on_log = _fires("on_log")
    on_push_begin = _fires("on_push_begin")

    def _accepts(self, callback: Any) -> bool:
        """Refuse native callbacks; warn about a second one of a class, and about methods named almost like an event."""
        kind = type(callback)
        if isinstance(callback, NativeCallback):
            raise ArgumentTypeError(
                f"{kind.__name__} is a callback of pytorch_accelerated.Trainer, and this trainer calls callbacks with "
                "`args, state, control`. Use one of pytorch_accelerated.huggingface, or arguments such as `report_to`."
            )
        if any(_job(type(other)) == _job(kind) for other in self.callbacks):
            warnings.warn(
                f"A second {kind.__name__} was added to the callbacks, so it will act twice. "
                f"Remove the first with `remove_callback({kind.__name__})`, unless that is what you want.",
                stacklevel=stacklevel_of_user(),
            )
        for name, hint in self._unknown_events(callback, cutoff=0.85):
            if hint:  # names that are less alike are nobody's mistake
                warnings.warn(
                    f"{kind.__name__}.{name} will never be called: no event has that name.{hint}",
                    stacklevel=stacklevel_of_user(),
                )
        return True

    def _empty_bases(self) -> tuple[type, ...]:
        genuine = getattr(sys.modules.get("transformers.trainer_callback"), "TrainerCallback", TrainerCallback)
        return TrainerCallback, genuine

    def _methods_now(self, event: str) -> list[Callable[..., Any]]:
        """The methods that act at `event`.

        Callbacks and their methods may be exchanged at any time. The former is noticed at once; the latter at the next
        event that is not among the frequent ones, so that idle events cost next to nothing.
        """
        if event not in _FREQUENT_EVENTS:
            self._forget_methods()
        self._notice_changes()
        return self._methods[event]

    def _notice_changes(self) -> None:
        if self._callbacks != self._known_callbacks:
            self._known_callbacks = list(self._callbacks)
            self._agrees = any(map(needs_agreement, self._callbacks))
            self._forget_methods()


def is_ours(part: Any) -> bool:
    """Whether a method, or the class of an object, is one of this library, not one of the user's."""
    return str(part.__module__).startswith(f"{_OURS}.")


def _job(kind: type) -> Any:
    """What a class of callbacks is for: those of this library and of `transformers` say so by their names."""
    name = kind.__name__.removeprefix("Notebook")  # NotebookProgressCallback
    return name if kind.__module__.partition(".")[0] in (_OURS, "transformers") else kind


@dataclasses.dataclass(frozen=True)
class RunEnd:
    """What a summary says about the end of a training, besides the state.

    Attributes:
        reason: why it ended early, if that is known.
        skipped_updates: updates that were not applied, because gradients were not finite.
        num_warnings: the warnings that this process has shown.
    """

    reason: str = ""
    skipped_updates: int = 0
    num_warnings: int = 0


def is_log_due(args: Any, state: Any, step: int) -> bool:
    """Whether the arguments request a log after this step."""
    is_multiple = args.logging_strategy == IntervalStrategy.STEPS and step % state.logging_steps == 0
    return is_multiple or (args.logging_first_step and step == 1)


class DefaultFlowCallback(TrainerCallback):
    """Requests logs, evaluations, checkpoints and the end of the run, as the arguments say.

    Its intervals are those of the state, which are numbers of updates even if the arguments have shares of a run.
    """

    ranks_agree_after_each_update = False

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """Request what is due after this update; the last one is always evaluated and saved, if others are."""
        step = state.global_step
        is_last = step >= state.max_steps
        control.should_training_stop |= is_last
        control.should_log |= is_log_due(args, state, step)
        if args.eval_strategy == IntervalStrategy.STEPS and (is_last or step % state.eval_steps == 0):
            control.should_evaluate |= step >= args.eval_delay
        if args.save_strategy == SaveStrategy.STEPS and (is_last or step % state.save_steps == 0):
            control.should_save = True
        return control

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """Request what is due after every epoch."""
        control.should_log |= args.logging_strategy == IntervalStrategy.EPOCH
        control.should_evaluate |= args.eval_strategy == IntervalStrategy.EPOCH and state.epoch >= args.eval_delay
        control.should_save |= args.save_strategy == SaveStrategy.EPOCH
        return control


class PrinterCallback(TrainerCallback):
    """Prints the logs, once on each machine, if there are no progress bars."""

    ranks_agree_after_each_update = False

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> Any:
        """Print the logs as a dict, without the number of operations."""
        if state.is_local_process_zero and logs:
            show({name: value for name, value in logs.items() if name != "total_flos"})


class EarlyStoppingCallback(TrainerCallback, ExportableState):
    """Ends the run when ``metric_for_best_model`` has stopped improving.

    Every evaluation during training is compared with the best one before it. An evaluation without the metric, of
    another of several datasets, is ignored.

    Args:
        early_stopping_patience: the run ends after so many evaluations in a row without an improvement.
        early_stopping_threshold: an improvement is a change by more than this, in units of the metric.

    Attributes:
        early_stopping_patience_counter: evaluations in a row without an improvement, so far.
        reason_to_stop: why the callback ended the current training, or "".

    Raises:
        CallbackSetupError: if the patience is less than 1, or the threshold negative. When a training begins, if the
            arguments have no ``metric_for_best_model`` or no evaluations.
    """

    ranks_agree_after_each_update = False

    def __init__(self, early_stopping_patience: int = 1, early_stopping_threshold: float | None = 0.0) -> None:
        threshold = early_stopping_threshold or 0.0
        if not (early_stopping_patience >= 1 and threshold >= 0):
            raise CallbackSetupError(
                f"EarlyStoppingCallback has a patience of {early_stopping_patience!r} and a threshold of "
                f"{early_stopping_threshold!r}: give a patience of 1 or more, and a threshold from 0 on."
            )
        self.early_stopping_patience = early_stopping_patience
        self.early_stopping_threshold = threshold
        self.early_stopping_patience_counter = 0
        self.reason_to_stop = ""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """Check that there will be evaluations with a metric."""
        self.reason_to_stop = ""
        if args.metric_for_best_model is None or args.eval_strategy == IntervalStrategy.NO:
            raise CallbackSetupError(
                "EarlyStoppingCallback compares evaluations by a metric, but `metric_for_best_model` is "
                f"{args.metric_for_best_model!r} and `eval_strategy` is {str(args.eval_strategy)!r}. Give both."
            )

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any) -> Any:
        """Compare an evaluation with the best one."""
        name = args.metric_for_best_model
        name = name if name.startswith("eval_") else f"eval_{name}"
        value = (metrics or {}).get(name)
        if value is None:
            return
        if state.best_metric is None:
            # The first value counts as an improvement, even NaN, but a second NaN does not.
            is_better = not math.isnan(value) or sum(name in entry for entry in state.log_history) < 2
        else:
            gain = value - state.best_metric
            is_better = (gain if args.greater_is_better else -gain) > self.early_stopping_threshold
        self.early_stopping_patience_counter = 0 if is_better else self.early_stopping_patience_counter + 1
        if self.early_stopping_patience_counter >= self.early_stopping_patience:
            control.should_training_stop = True
            more = f" by more than {self.early_stopping_threshold:g}" if self.early_stopping_threshold else ""
            evaluations = format_count(self.early_stopping_patience_counter, "evaluation")
            self.reason_to_stop = f"{name} had no improvement{more} in {evaluations}"

    def state(self) -> dict[str, Any]:
        """Patience, threshold and counter."""
        return {
            "args": {
                "early_stopping_patience": self.early_stopping_patience,
                "early_stopping_threshold": self.early_stopping_threshold,
            },
            "attributes": {"early_stopping_patience_counter": self.early_stopping_patience_counter},
        }


DEFAULT_CALLBACKS: list[type] = [DefaultFlowCallback]


class Events:
    """Calls callbacks with the arguments, the state and the control of a trainer, all of which scripts may replace."""

    def __init__(self, watched: Trainer) -> None:
        self._watched = watched
        self._is_agreed = False  # by the ranks, since the last event

    def fire(self, event: str, **values: Any) -> None:
        """Call the callbacks for `event`."""
        watched = self._watched
        control = watched.callback_handler.fire(event, watched.args, watched.state, watched.control, **values)
        watched.control = control  # one that a callback has returned takes the place of the other
        self._is_agreed = False

    def listens_to(self, event: str) -> bool:
        """Whether any callback does something at `event`."""
        return self._watched.callback_handler.listens_to(event)

    def ranks_agree_after_each_update(self) -> bool:
        """Whether callbacks or methods of the user may request something on one rank alone."""
        return self._watched.callback_handler.ranks_agree_after_each_update() or not is_ours(self._watched)

    def agree(self, ranks: Ranks) -> None:
        """Set each flag of the control that any rank has set. Must be called by all ranks, before acting on flags."""
        if not self._is_agreed:
            flags = vars(self._watched.control)
            everyones = ranks.exchange_numbers([bool(flags[name]) for name in CONTROL_FLAGS])
            for name, asked in zip(CONTROL_FLAGS, zip(*everyones, strict=True), strict=True):
                if any(asked):
                    flags[name] = True
            self._is_agreed = True

    def note_end(self, reason: str, skipped_updates: int, num_warnings: int) -> None:
        """Inform the display of how a training ended, which no event does.

        Args:
            reason: why it ended early, or "" for what callbacks of ours know about that.
            skipped_updates, num_warnings: see `RunEnd`.
        """
        ours = [callback for callback in self._watched.callback_handler.callbacks if is_ours(callback)]
        reasons = (getattr(callback, "reason_to_stop", "") for callback in ours)
        end = RunEnd(reason or next(filter(None, reasons), ""), skipped_updates, num_warnings)
        for callback in ours:
            if hasattr(callback, "note_end"):
                callback.note_end(end)

    def close_displays(self) -> None:
        """Close progress bars and log files after an exception, for which callbacks have no event."""
        for callback in self._watched.callback_handler.callbacks:
            close = getattr(callback, "close", None)
            if callable(close) and is_ours(callback):
                close()
