"""The progress of a run, the requests of callbacks, and how callbacks are called, with ``args, state, control``."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import operator
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeVar

from pytorch_accelerated.errors import ArgumentTypeError, InvalidCheckpointError
from pytorch_accelerated.huggingface.arguments.fields import IntervalStrategy, SaveStrategy
from pytorch_accelerated.huggingface.trainer_utils import warn
from pytorch_accelerated.loop.callback import TrainerCallback as NativeCallback
from pytorch_accelerated.loop.handler import instance_of, needs_agreement, unknown_events
from pytorch_accelerated.states.disk import explained_reading

if TYPE_CHECKING:
    from pytorch_accelerated.huggingface.training_args import TrainingArguments


ExportableT = TypeVar("ExportableT", bound="ExportableState")


class ExportableState:
    """Base of callbacks whose state is saved with checkpoints, in ``trainer_state.json``."""

    def state(self) -> dict[str, Any]:
        """Plain values: ``args`` for the constructor, and ``attributes`` to set afterwards."""
        raise NotImplementedError(f"{type(self).__name__} is an ExportableState, but has no method `state`.")

    @classmethod
    def from_state(cls: type[ExportableT], state: dict[str, Any]) -> ExportableT:
        """Make a new object from the result of `state`, in which either of the two may be missing."""
        instance = cls(**state.get("args", {}))
        for name, value in state.get("attributes", {}).items():
            setattr(instance, name, value)
        return instance


@dataclasses.dataclass
class TrainerControl(ExportableState):
    """The requests of callbacks. The trainer acts on them after the event, and clears those that it has fulfilled."""

    should_training_stop: bool = False
    should_epoch_stop: bool = False
    should_save: bool = False
    should_evaluate: bool = False
    should_log: bool = False

    def state(self) -> dict[str, Any]:
        """The flags."""
        return {"args": dataclasses.asdict(self), "attributes": {}}


CONTROL_FLAGS = tuple(field.name for field in dataclasses.fields(TrainerControl))


@dataclasses.dataclass
class TrainerState:
    """The progress of a run: the content of ``trainer_state.json``. A step is an optimizer update.

    Attributes:
        epoch: passes over the training set, with the fraction of the current one.
        global_step: updates done.
        max_steps: updates of the whole run.
        logging_steps: updates between two logs, also if the arguments have a share of the run. Those between
            evaluations and checkpoints, `eval_steps` and `save_steps`, likewise.
        train_batch_size: of one device.
        num_train_epochs: passes of the whole run, rounded up.
        num_input_tokens_seen: if the arguments ask to count them.
        total_flos: floating point operations, as estimated by the model.
        log_history: all logs, oldest first.
        best_metric: the best value so far, if the arguments name a metric.
        best_global_step: the step of that value.
        best_model_checkpoint: the checkpoint of that step, if there is one.
        is_local_process_zero: whether this is the first process of its machine.
        is_world_process_zero: whether this is the first process of all.
        is_hyper_param_search: always False, as the trial's name and parameters are always None.
        stateful_callbacks: states by class name of every `ExportableState` among the callbacks, and of the control. A
            list of such objects is replaced by their states.
    """

    epoch: float = 0
    global_step: int = 0
    max_steps: int = 0
    logging_steps: int = 500
    eval_steps: int = 500
    save_steps: int = 500
    train_batch_size: int | None = None
    num_train_epochs: int = 0
    num_input_tokens_seen: int = 0
    total_flos: float = 0
    log_history: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    best_metric: float | None = None
    best_global_step: int | None = None
    best_model_checkpoint: str | None = None
    is_local_process_zero: bool = True
    is_world_process_zero: bool = True
    is_hyper_param_search: bool = False
    trial_name: str | None = None
    trial_params: dict[str, Any] | None = None
    stateful_callbacks: dict[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.stateful_callbacks, dict):
            self.stateful_callbacks = exported_states(self.stateful_callbacks or ())

    def compute_steps(self, args: TrainingArguments, max_steps: int) -> None:
        """Set `logging_steps`, `eval_steps` and `save_steps`, with shares converted to updates and rounded up."""
        for name in ("logging_steps", "eval_steps", "save_steps"):
            steps = getattr(args, name)
            if steps is not None:
                setattr(self, name, math.ceil(max_steps * steps) if steps < 1 else int(steps))

    def to_json(self) -> str:
        """The content of ``trainer_state.json``."""
        content = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        # Python's JSON has NaN and Infinity, for losses that are not finite.
        return json.dumps(content, indent=2, sort_keys=True) + "\n"

    def save_to_json(self, json_path: str | os.PathLike[str]) -> None:
        """Write the state to a file."""
        Path(json_path).write_text(self.to_json(), encoding="utf-8")

    @classmethod
    def load_from_json(cls, json_path: str | os.PathLike[str]) -> TrainerState:
        """Read a file of `save_to_json`.

        Raises:
            InvalidCheckpointError: if the file is not a trainer state.
        """
        try:
            with explained_reading(Path(json_path)):
                content = json.loads(Path(json_path).read_text(encoding="utf-8"))
            return cls(**{**content, "global_step": int(content["global_step"])})
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            raise InvalidCheckpointError(f"{json_path} is not a trainer state: {str(error):.500}.") from error


def exported_states(parts: Iterable[Any]) -> dict[str, Any]:
    """The states by class name of those parts that have one, as a list for multiple objects of one class."""
    states: dict[str, list[dict[str, Any]]] = {}
    for part in parts:
        if callable(getattr(part, "state", None)) and hasattr(part, "from_state"):
            states.setdefault(type(part).__name__, []).append(part.state())
    return {name: alike if len(alike) > 1 else alike[0] for name, alike in states.items()}


def new_state(trainer: Any) -> TrainerState:
    """The progress of a run that has not begun."""
    return TrainerState(
        is_local_process_zero=trainer._engine.ranks.is_first_of_node,
        is_world_process_zero=trainer._engine.ranks.is_first,
        stateful_callbacks=exported_states([*trainer.callback_handler.callbacks, trainer.control]),
    )


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


def is_log_due(args: Any, state: Any, step: int) -> bool:
    """Whether the arguments request a log after this step."""
    is_multiple = args.logging_strategy == IntervalStrategy.STEPS and step % state.logging_steps == 0
    return is_multiple or (args.logging_first_step and step == 1)


class DefaultFlowCallback(TrainerCallback):
    """Requests logs, evaluations, checkpoints and the end of the run, as the arguments say.

    Its intervals come from the state, which has numbers of updates even if the arguments have shares of a run.
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


EVENTS = tuple(name for name in vars(TrainerCallback) if name.startswith("on_"))
# An event clears these flags of the control when it begins: they are fulfilled, or about to be decided again.
_CLEARED_AT = {
    "on_train_begin": ("should_training_stop",),
    "on_epoch_begin": ("should_epoch_stop",),
    "on_step_begin": ("should_save", "should_evaluate", "should_log"),
    "on_save": ("should_save",),
    "on_evaluate": ("should_evaluate",),
    "on_log": ("should_log",),
}
# Every callback gets these attributes of `CallbackHandler`.
_HANDED_OVER = ("model", "processing_class", "optimizer", "lr_scheduler", "train_dataloader", "eval_dataloader")
_values_handed_over = operator.attrgetter(*_HANDED_OVER)
# Scripts give these values of an event by position.
_VALUES = {"on_evaluate": "metrics", "on_predict": "metrics", "on_log": "logs"}


class CallbackHandler:
    """Holds the callbacks of a trainer, in the order given, and calls them with ``args, state, control``.

    Callbacks may be genuine ones of `transformers`, or any objects with methods named like events. They and their
    methods may be exchanged at any time. All attributes but the callbacks are handed to them.

    Args:
        callbacks: instances, or classes that can be made without arguments.

    Attributes:
        callbacks: the instances. The list may be changed at any time.
        is_agreed: whether the ranks have agreed on the flags of the control since the last event.
    """

    is_agreed = False

    def __init__(
        self, callbacks: Iterable[Any], model: Any, processing_class: Any, optimizer: Any, lr_scheduler: Any
    ) -> None:
        self.callbacks: list[Any] = []
        self.model = model
        self.processing_class = processing_class
        self.optimizer = optimizer
        self.lr_scheduler = lr_scheduler
        self.train_dataloader: Any = None  # until there is one
        self.eval_dataloader: Any = None
        for callback in callbacks:
            self.add_callback(callback)

    @property
    def callback_list(self) -> str:
        """The names of the callbacks' classes, a line each."""
        return "\n".join(type(callback).__name__ for callback in self.callbacks)

    def add_callback(self, callback: Any) -> None:
        """Add a callback, an instance or a class, at the end.

        Warns about a second one of a class, and about methods named almost like an event.

        Raises:
            ArgumentTypeError: for a native callback, or one without any method that is named like an event.
        """
        instance = instance_of(callback, EVENTS)
        kind = type(instance)
        if isinstance(instance, NativeCallback):
            raise ArgumentTypeError(
                f"{kind.__name__} is a callback of pytorch_accelerated.Trainer. Use one of "
                "pytorch_accelerated.huggingface, or arguments such as `report_to`."
            )
        if any(_job(type(other)) == _job(kind) for other in self.callbacks):
            warn(
                f"A second {kind.__name__} was added to the callbacks, so it will act twice. "
                f"Remove the first with `remove_callback({kind.__name__})`, unless that is what you want."
            )
        for name, hint in unknown_events(instance, EVENTS, cutoff=0.85):
            warn(f"{kind.__name__}.{name} will never be called: no event has that name.{hint}")
        self.callbacks.append(instance)

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

    def fire(
        self, event: str, trainer: Any, clears: Mapping[str, Sequence[str]] = _CLEARED_AT, /, **values: Any
    ) -> None:
        """Call all callbacks in their order, with the arguments, the state and the control that a trainer has now.

        Each is asked for its method when its turn comes, because scripts exchange callbacks, and methods of them, in
        the middle of a run. To check whether an earlier answer still holds would take as long.

        Args:
            event: the name of the method.
            trainer: a control that a callback returns takes the place of the trainer's.
            clears: the flags of the control, by event, that are cleared first.
            values: of the event, by name.
        """
        self.is_agreed = False
        args, state, control = trainer.args, trainer.state, trainer.control
        for flag in clears.get(event, ()):
            setattr(control, flag, False)
        empty = getattr(TrainerCallback, event, None)
        for callback in tuple(self.callbacks):  # one may remove itself
            method = getattr(callback, event, None)
            if getattr(method, "__func__", method) is not empty and callable(method):  # most have the empty one
                parts = zip(_HANDED_OVER, _values_handed_over(self), strict=True)
                result = method(args, state, control, **dict(parts), **values)
                control = control if result is None else result
        trainer.control = control

    def call_event(self, event: str, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """Call all callbacks in their order, and return the control that they leave, for scripts."""
        given = SimpleNamespace(args=args, state=state, control=control)
        self.fire(event, given, {}, **kwargs)
        return given.control

    def call_own_event(self, event: str, args: Any, state: Any, control: Any, *values: Any, **kwargs: Any) -> Any:
        """Do what the method named like `event` does: `call_event`, but flags of the control are cleared first.

        Args:
            event, args, state, control, kwargs: as there.
            values: the metrics or the logs of an event that has them, for which scripts give no name.
        """
        kwargs.update(zip([_VALUES[event]] if values else [], values, strict=True))
        given = SimpleNamespace(args=args, state=state, control=control)
        self.fire(event, given, **kwargs)
        return given.control

    def ranks_agree_after_each_update(self) -> bool:
        """Whether some callback may set a flag of the control at any time, as the callbacks declare."""
        return any(map(needs_agreement, self.callbacks))

    def note_end(self, reason: str, skipped_updates: int) -> None:
        """Inform the display of how a training ended, which no event does.

        Args:
            reason: why it ended early, or "" for what callbacks of ours know about that.
            skipped_updates: updates that were not applied, because gradients were not finite.
        """
        ours = list(filter(is_ours, self.callbacks))
        reasons = (getattr(callback, "reason_to_stop", "") for callback in ours)
        reason = reason or next(filter(None, reasons), "")
        for callback in ours:
            if hasattr(callback, "note_end"):
                callback.note_end(reason, skipped_updates)

    def close_displays(self) -> None:
        """Close progress bars and log files after an exception, for which callbacks have no event."""
        for callback in filter(is_ours, self.callbacks):
            if callable(close := getattr(callback, "close", None)):
                close()

    if TYPE_CHECKING:  # the methods of the events

        def __getattr__(self, name: str) -> Callable[..., Any]: ...


for _event in EVENTS:  # scripts call the method of an event
    setattr(CallbackHandler, _event, functools.partialmethod(CallbackHandler.call_own_event, _event))


def is_ours(part: Any) -> bool:
    """Whether a method, or the class of an object, is one of this library, not one of the user's."""
    return str(part.__module__).startswith(f"{_OURS}.")


def _job(kind: type) -> Any:
    """What a class of callbacks is for: classes of this library and of `transformers` say so by their names."""
    name = kind.__name__.removeprefix("Notebook")  # NotebookProgressCallback
    return name if kind.__module__.partition(".")[0] in (_OURS, "transformers") else kind
