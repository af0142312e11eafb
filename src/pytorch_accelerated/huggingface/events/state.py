"""The progress of a run, the requests of callbacks, and both as JSON."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from pytorch_accelerated.checkpointing.reading import explained_reading
from pytorch_accelerated.errors import InvalidCheckpointError

if TYPE_CHECKING:
    from pytorch_accelerated.huggingface.arguments.training_arguments import TrainingArguments

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
        # Python writes and reads losses that are not finite as NaN and Infinity.
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
            state = cls(**content)
            amounts = {name: content[name] for name in ("epoch", "global_step")}
            amounts |= {name: getattr(state, name) or 0 for name in ("num_input_tokens_seen", "best_global_step")}
            for name, amount in amounts.items():
                if not 0 <= amount <= sys.maxsize:
                    raise ValueError(f"{name!r} is {amount!r}")
            if state.global_step > state.max_steps > 0:
                raise ValueError(f"'global_step' is {state.global_step}, but 'max_steps' is {state.max_steps}")
            if not all(isinstance(entry, dict) for entry in content["log_history"]):
                raise ValueError("'log_history' is no list of objects")
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            raise InvalidCheckpointError(
                f"{json_path} is not a trainer state: {str(error):.500}. Use another checkpoint."
            ) from error
        return state


def exported_states(exportables: Iterable[Any]) -> dict[str, Any]:
    """The states of `exportables` by class name, as a list for several objects of one class."""
    states: dict[str, list[dict[str, Any]]] = {}
    for exportable in exportables:
        states.setdefault(type(exportable).__name__, []).append(exportable.state())
    return {name: several if len(several) > 1 else several[0] for name, several in states.items()}


def states_of_callbacks(callbacks: Iterable[Any], control: TrainerControl) -> dict[str, Any]:
    """The states of the control, and of those callbacks that have one, as `exported_states` has them."""
    parts = [*callbacks, control]
    return exported_states(
        part for part in parts if callable(getattr(part, "state", None)) and hasattr(part, "from_state")
    )
