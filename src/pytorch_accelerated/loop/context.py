"""`Context`: what one call of the trainer works with. The trainer's attributes are views of it."""

from __future__ import annotations

import dataclasses
import inspect
import operator
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytorch_accelerated.facts.names import GivenArguments
from pytorch_accelerated.facts.run_state import RunState
from pytorch_accelerated.facts.settings import LIMITS, TrainSettings

if TYPE_CHECKING:
    from pytorch_accelerated.data.run_plan import RunPlan
    from pytorch_accelerated.data.updates import Loaders
    from pytorch_accelerated.loop.evaluation_sets import EvaluationSets
    from pytorch_accelerated.loop.handler import CallbackHandler
    from pytorch_accelerated.loop.reports import LossReports
    from pytorch_accelerated.loop.states import Saves, States
    from pytorch_accelerated.loop.stopping import Emitter, Stopping
    from pytorch_accelerated.loop.training import Training
    from pytorch_accelerated.ranks.accelerators import Accelerator
    from pytorch_accelerated.ranks.preparation import OptimizerMode, PreparedModel
    from pytorch_accelerated.ranks.ranks import Ranks, UnevenRanks
    from pytorch_accelerated.record.history import RunHistory
    from pytorch_accelerated.record.loss import LossTracker
    from pytorch_accelerated.record.step_records import EpochClock, StepRecorder
    from pytorch_accelerated.run_config import TrainerRunConfig


# The trainer's attributes that a subclass may define in its own way.
_MAY_BE_OWN = ("model", "optimizer", "scheduler", "run_history", "run_state", "run_config", "callback_handler")
_LATER: Any = None  # until the constructor of the trainer, or a call that needs it, sets it


@dataclasses.dataclass(eq=False, repr=False)
class Context:
    """What a call of `train`, `evaluate` or `predict` works with. Each call has one of its own, made from the last one.

    Attributes:
        trainer: has the hooks.
        holder: the trainer that users see, whose attributes may belong to the run, too; see `models.held`.
        given: the arguments of the trainer's constructor.
        accelerator: accelerate's object of this process.
        ranks: the processes.
        model: the trainer's; during training it may be wrapped.
        optimizer, scheduler, history, callbacks, config, state: the trainer's.
        loaders: of the training and the evaluation sets.
        settings: the arguments of `train`.
        seed: of everything random in the run.
        number: training runs of the trainer so far, including this one.
        epochs_before: epochs of the runs that this run continues, with `reset_run_history=False`.
        plan: what determines the rows of the updates of the last training run; None before one.
        left_out: the training data that the run leaves out, each a `LeftOut`.
        resumed_from: the training state that the run was resumed from, if any.
        last_training: the settings and the other arguments of the last `train`; None before the first.
        count_items: the user's `count_batch_items`, if there is one.
        losses: the current loss tracker.
        gradient_norms: the gradient norms of the current epoch, if gradients are clipped by norm.
        recorder: makes the step records of a training run, if it has any.
        epoch_clock: times the current epoch.
        is_at_work: whether the call has begun and is not over.
        prepared: the model and the optimizer as prepared for the call; None before and after.
        mode: of the optimizers that have modes.
        uneven: how rows count when some ranks have none; None for a single process.
        emitter: calls callbacks and hooks.
        stopping: reasons to stop.
        saves: the training states that the call has written.
        states: writes, reads and loads training states.
        reports: brings losses that have been read to the history and the callbacks.
        evaluation_sets: the evaluation sets by name.
        training: what the call trains with; None if it does not train.
        position_in_pass: the position of the first sample of the batch that is evaluated, in the whole evaluation; None
            if there is none, or a loop of the user's own goes through the batches.
        batch_weight: how much the current batch counts in the recorded loss: what its mean is over. None before one.
        page: the display of a training run in a notebook, opened by a callback; None elsewhere.
    """

    trainer: Any
    holder: Any
    given: GivenArguments = _LATER
    accelerator: Accelerator = _LATER
    ranks: Ranks = _LATER
    model: Any = None
    optimizer: Any = None
    scheduler: Any = None
    history: RunHistory = _LATER
    callbacks: CallbackHandler = _LATER
    config: TrainerRunConfig | None = None
    state: RunState = dataclasses.field(default_factory=RunState)
    loaders: Loaders = _LATER
    settings: TrainSettings = TrainSettings(num_epochs=1)
    seed: int = 0
    number: int = 0
    epochs_before: int = 0
    plan: RunPlan | None = None
    left_out: tuple[Any, ...] = ()
    resumed_from: Path | None = None
    last_training: tuple[TrainSettings, dict[str, Any]] | None = None
    count_items: Callable[[Any], int | None] | None = None
    losses: LossTracker = _LATER
    gradient_norms: LossTracker = _LATER
    recorder: StepRecorder | None = None
    epoch_clock: EpochClock = _LATER
    is_at_work: bool = False
    prepared: PreparedModel = _LATER
    mode: OptimizerMode = _LATER
    uneven: UnevenRanks = _LATER
    emitter: Emitter = _LATER
    stopping: Stopping = _LATER
    saves: Saves = _LATER
    states: States = _LATER
    reports: LossReports = _LATER
    evaluation_sets: EvaluationSets = _LATER
    training: Training = _LATER
    position_in_pass: int | None = None
    batch_weight: Any = None
    page: Any = None

    @property
    def parameter_groups(self) -> list[dict[str, Any]]:
        """The parameter groups of the optimizer; none if the user steps other optimizers."""
        return getattr(self.optimizer, "param_groups", [])

    @property
    def is_at_limit(self) -> bool:
        """Whether the run has reached its limit of updates, samples or tokens, if it has one."""
        limit = self.settings.limit
        return limit is not None and getattr(self.state, LIMITS[limit]) >= getattr(self.settings, limit)

    @property
    def is_last_epoch(self) -> bool:
        """Whether the run ends, as far as is known, when the current epoch is over."""
        if self.settings.limit is not None:
            return self.is_at_limit
        return self.state.epochs + 1 >= (self.settings.num_epochs or 1)

    def release_model(self) -> None:
        """Remove the wrappers that training needed from the model and the optimizer."""
        prepared, self.prepared = self.prepared, _LATER
        self.mode.eval()
        if prepared is not None:
            self.model, self.optimizer = prepared.release(self.model)

    def print(self, *args: Any, **kwargs: Any) -> None:
        """`print` on the first process of each node, as the trainer does it."""
        self.trainer.print(*args, **kwargs)


class View(property):
    """An attribute of the trainer that is kept in its context, at `path`: reading and assigning it goes there."""

    def __init__(self, path: str) -> None:
        owner, _, name = f"run_context.{path}".rpartition(".")
        owner_of = operator.attrgetter(owner)
        super().__init__(
            operator.attrgetter(f"run_context.{path}"), lambda self, value: setattr(owner_of(self), name, value)
        )


def view(path: str) -> Any:
    """A `View`, whose type is that of what it shows."""
    return View(path)


def first_context(trainer: Any) -> Context:
    """The context of a new trainer. Attributes that its class defines itself, not as views, stay the trainer's own."""
    kind = OwningContext if any(_is_own(trainer, name) for name in _MAY_BE_OWN) else Context
    return kind(trainer, trainer)


def _is_own(trainer: Any, name: str) -> bool:
    return not isinstance(inspect.getattr_static(type(trainer), name), View)


def _own_or_kept(name: str, field: str) -> Any:
    """The trainer's attribute if its class defines it, else the value in the context."""

    def read(context: Context) -> Any:
        return getattr(context.trainer, name) if _is_own(context.trainer, name) else vars(context)[field]

    def write(context: Context, value: Any) -> None:
        if _is_own(context.trainer, name):
            setattr(context.trainer, name, value)
        else:
            vars(context)[field] = value

    return property(read, write)


class OwningContext(Context):
    """The context of a trainer whose class defines an attribute such as `model` itself."""

    model = _own_or_kept("model", "model")
    optimizer = _own_or_kept("optimizer", "optimizer")
    scheduler = _own_or_kept("scheduler", "scheduler")
    history = _own_or_kept("run_history", "history")
    state = _own_or_kept("run_state", "state")
    config = _own_or_kept("run_config", "config")
    callbacks = _own_or_kept("callback_handler", "callbacks")
