"""`Context`: what one call of the trainer works with. The trainer's attributes are views of it."""

from __future__ import annotations

import copy
import dataclasses
import math
import operator
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

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
    from pytorch_accelerated.run_config import TrainerRunConfig


_LATER: Any = None  # set by the constructor of the trainer, or by the call, before anything reads it


@dataclasses.dataclass(eq=False, repr=False, slots=True)
class Asked:
    """What a call was asked to do: it says which rows each update has.

    Attributes:
        given: the arguments of the trainer's constructor.
        settings: the arguments of `train`.
        last_training: the settings and the other arguments of the last `train`; None before the first.
        seed: of everything random in the run.
        number: training runs of the trainer so far, including this one.
        epochs_before: epochs of the runs that this run continues, with `reset_run_history=False`.
        resumed_from: the training state that the run was resumed from, if any.
        plan: what determines the rows of the updates of the last training run; None before one.
        left_out: the training data that the run leaves out, each a `LeftOut`.
        branch_of: where the run left another one, and where that one did: what `Trainer.branch` wrote to the state.
        count_items: the user's `count_batch_items`, if there is one.
    """

    given: GivenArguments = _LATER
    settings: TrainSettings = TrainSettings(num_epochs=1)
    last_training: tuple[TrainSettings, dict[str, Any]] | None = None
    seed: int = 0
    number: int = 0
    epochs_before: int = 0
    resumed_from: Path | None = None
    plan: RunPlan | None = None
    left_out: tuple[Any, ...] = ()
    branch_of: tuple[Any, ...] = ()
    count_items: Callable[[Any], int | None] | None = None


@dataclasses.dataclass(eq=False, repr=False)
class Parts:
    """What a call works with: the trainer's parts, the processes, and what measures.

    Attributes:
        accelerator: accelerate's object of this process.
        ranks: the processes.
        uneven: how rows count when some ranks have none; None for a single process.
        model: the trainer's; during training it may be wrapped.
        optimizer, scheduler, history, callbacks, config, state: the trainer's.
        prepared: the model and the optimizer as prepared for the call; None before and after.
        mode: of the optimizers that have modes.
        loaders: of the training and the evaluation sets.
        reports: losses, gradient norms and times, and how they get to the history and the callbacks.
        given_rates, left_rates: the learning rates of the groups before and after the last schedule.
    """

    accelerator: Accelerator = _LATER
    ranks: Ranks = _LATER
    uneven: UnevenRanks | None = None
    model: Any = None
    optimizer: Any = None
    scheduler: Any = None
    prepared: PreparedModel | None = None
    mode: OptimizerMode = _LATER
    loaders: Loaders = _LATER
    history: RunHistory = _LATER
    callbacks: CallbackHandler = _LATER
    config: TrainerRunConfig | None = None
    state: RunState = dataclasses.field(default_factory=RunState)
    reports: LossReports = _LATER
    given_rates: Sequence[float] = ()
    left_rates: Sequence[float] = ()

    @property
    def parameter_groups(self) -> list[dict[str, Any]]:
        """The parameter groups of the optimizer; none if the user steps other optimizers."""
        return getattr(self.optimizer, "param_groups", [])

    def of_next_call(self) -> Parts:
        """A copy without what belonged to the call that is over."""
        parts = copy.copy(self)
        parts.loaders, parts.prepared = copy.copy(self.loaders), None  # the loaders of that call stay as they are
        return parts

    def begin_schedule(self) -> None:
        """Give the optimizer the rates from before the last schedule, unless the user has set others since."""
        for group, given, left in zip(self.parameter_groups, self.given_rates, self.left_rates, strict=False):
            if float(group.get("lr", math.nan)) == left:
                group["lr"] = torch.full_like(group["lr"], given) if isinstance(group["lr"], torch.Tensor) else given
            if "initial_lr" in group:  # from which schedulers begin
                group["initial_lr"] = copy.deepcopy(group["lr"])
        self.given_rates, self.left_rates = self._rates(), ()

    def end_schedule(self) -> None:
        """Note the rates with which a schedule ends. Only the first call after its beginning has an effect."""
        if self.scheduler is not None:
            self.left_rates = self.left_rates or self._rates()

    def _rates(self) -> list[float]:
        return [float(group.get("lr", math.nan)) for group in self.parameter_groups]

    def release_model(self) -> None:
        """Remove the wrappers that training needed from the model and the optimizer."""
        prepared, self.prepared = self.prepared, None
        self.mode.eval()
        if prepared is not None:
            self.model, self.optimizer = prepared.release(self.model)


@dataclasses.dataclass(eq=False, repr=False, slots=True)
class Control:
    """What a call does besides computing: it calls users' code, stops, saves and evaluates.

    Attributes:
        is_at_work: whether the call has begun and is not over.
        emitter: calls callbacks and hooks.
        stopping: reasons to stop.
        saves: the training states that the call has written.
        states: writes, reads and loads training states.
        evaluation_sets: the evaluation sets by name.
        training: the position in a training run; only `train` sets it.
    """

    is_at_work: bool = False
    emitter: Emitter = _LATER
    stopping: Stopping = _LATER
    saves: Saves = _LATER
    states: States = _LATER
    evaluation_sets: EvaluationSets = _LATER
    training: Training = _LATER


@dataclasses.dataclass(eq=False, repr=False, slots=True)
class Context:
    """A call of `train`, `evaluate` or `predict`. Each has one of its own, made from the context of the call before.

    Take only the part that you need; take the whole context only to call users' hooks or to make the parts.

    Attributes:
        trainer: has the hooks.
        holder: `trainer`, except for Hugging Face, where the engine runs the loop and users hold its face. Its
            attributes may belong to the run, too; see `held_parts`.
        asked: what the call was asked to do.
        parts: what it works with.
        control: what it does besides computing.
        page: the display of a training run in a notebook, opened by a callback; None elsewhere.
    """

    trainer: Any
    holder: Any
    asked: Asked
    parts: Parts
    control: Control
    page: Any = None

    @property
    def is_at_limit(self) -> bool:
        """Whether the run has reached its limit of updates, samples or tokens, if it has one."""
        settings = self.asked.settings
        limit = settings.limit
        return limit is not None and getattr(self.parts.state, LIMITS[limit]) >= getattr(settings, limit)

    @property
    def is_last_epoch(self) -> bool:
        """Whether the run ends, as far as is known, when the current epoch is over."""
        if self.asked.settings.limit is not None:
            return self.is_at_limit
        return self.parts.state.epochs + 1 >= (self.asked.settings.num_epochs or 1)

    def copied(self, **parts: Any) -> Context:
        """A copy with copies of the three, for side work; `parts` replace the trainer's."""
        copied = copy.copy(self)
        copied.asked, copied.parts, copied.control = (
            copy.copy(self.asked),
            copy.copy(self.parts),
            copy.copy(self.control),
        )
        for name, part in parts.items():
            setattr(copied.parts, name, part)
        return copied

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
    """A `View`, with the type of what it shows."""
    return View(path)
