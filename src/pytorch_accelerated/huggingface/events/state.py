"""The progress of a run, the requests of callbacks, and both as JSON."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import types
import typing
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from pytorch_accelerated.checkpointing.reading import explained_reading
from pytorch_accelerated.errors import ArgumentTypeError, InvalidCheckpointError

if TYPE_CHECKING:
    from pytorch_accelerated.huggingface.arguments.training_arguments import TrainingArguments

ExportableT = TypeVar("ExportableT", bound="ExportableState")


class ExportableState:
    """Base of callbacks whose state is saved with checkpoints, in ``trainer_state.json``."""

    def state(self) -> dict[str, Any]:
        """Plain values: ``args`` for the constructor, and ``attributes`` to set afterwards."""
        raise NotImplementedError(
            f"{type(self).__name__} is an ExportableState, but has no method `state`. Write one that returns "
            "{'args': {...}, 'attributes': {...}} with plain values."
        )

    @classmethod
    def from_state(cls: type[ExportableT], state: dict[str, Any]) -> ExportableT:
        """Make a new object from the result of `state`, in which either of the two may be missing."""
        try:
            instance = cls(**state.get("args", {}))
            for name, value in state.get("attributes", {}).items():
                setattr(instance, name, value)
        except (AttributeError, TypeError) as error:
            raise InvalidCheckpointError(
                f"{cls.__name__} cannot be made from the state {state!r} ({type(error).__name__}: {error}). Give a "
                "dict with 'args', which the constructor takes, and 'attributes', as its method `state` returns it."
            ) from error
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
        try:
            content = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
            # Python writes and reads losses that are not finite as NaN and Infinity.
            return json.dumps(content, indent=2, sort_keys=True) + "\n"
        except TypeError as error:
            raise ArgumentTypeError(
                f"The trainer's state cannot be written as JSON: {error}, at "
                f"{_misfit_for_json(content) or 'a key of a dict'}. Log plain numbers and strings, and return "
                "plain values from the method `state` of callbacks."
            ) from error

    def save_to_json(self, json_path: str | os.PathLike[str]) -> None:
        """Write the state to a file."""
        Path(json_path).write_text(self.to_json(), encoding="utf-8")

    @classmethod
    def load_from_json(cls, json_path: str | os.PathLike[str]) -> TrainerState:
        """Read a file of `save_to_json`.

        Raises:
            InvalidCheckpointError: if the file is not a trainer state; names every wrong field.
        """
        try:
            with explained_reading(Path(json_path)):
                content = json.loads(Path(json_path).read_text(encoding="utf-8"))
        except (ValueError, RecursionError) as error:
            raise InvalidCheckpointError(f"{json_path} is not JSON: {error}. Use another checkpoint.") from error
        complaints = ["it is not an object"] if not isinstance(content, dict) else _misfits(cls, content)
        if complaints:
            raise InvalidCheckpointError(
                f"{json_path} is not a trainer state: {'; '.join(complaints)}. Use a file of `save_to_json`, or "
                "another checkpoint."
            )
        return cls(**content)


def exported_states(exportables: Iterable[Any]) -> dict[str, Any]:
    """The states of `exportables` by class name, as a list for several objects of one class."""
    states: dict[str, list[dict[str, Any]]] = {}
    for exportable in exportables:
        if not callable(getattr(exportable, "state", None)):
            raise ArgumentTypeError(
                f"`stateful_callbacks` holds {exportable!r}, which has no state to save. Make its class an "
                "ExportableState, or leave it out."
            )
        states.setdefault(type(exportable).__name__, []).append(exportable.state())
    return {name: several if len(several) > 1 else several[0] for name, several in states.items()}


def _misfit_for_json(value: Any) -> str | None:
    """The keys and indices of the first part of `value` that JSON cannot hold; None if there is none."""
    if isinstance(value, (dict, list, tuple)):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        paths = ((key, _misfit_for_json(item)) for key, item in items)
        return next((f"[{key!r}]{path}" for key, path in paths if path is not None), None)
    try:
        json.dumps(value)
    except TypeError:
        return ""
    return None


def _misfits(cls: type[TrainerState], content: dict[str, Any]) -> list[str]:
    """Everything that is wrong with `content` as the fields of `cls`."""
    hints = typing.get_type_hints(cls)
    names = [field.name for field in dataclasses.fields(cls)]
    unknown = [f"there is no field {name!r}" for name in content if name not in names]
    wrong = [
        f"{name!r} is {content[name]!r}, which is no {_spelled(hints[name])}"
        for name in names
        if name in content and not _fits(content[name], hints[name])
    ]
    missing = [f"{name!r} is missing" for name in ("epoch", "global_step", "log_history") if name not in content]
    return unknown + wrong + missing


def _fits(value: Any, hint: Any) -> bool:
    if hint is Any:
        return True
    origin = typing.get_origin(hint)
    if origin in (types.UnionType, typing.Union):
        return any(_fits(value, member) for member in typing.get_args(hint))
    if origin is list:
        return isinstance(value, list) and all(_fits(item, typing.get_args(hint)[0]) for item in value)
    if hint is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    return isinstance(value, origin or hint) and (hint is bool or not isinstance(value, bool))


def _spelled(hint: Any) -> str:
    return getattr(hint, "__name__", str(hint)) if typing.get_origin(hint) is None else str(hint)
