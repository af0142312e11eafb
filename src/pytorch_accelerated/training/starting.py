"""Begins and ends a call of the trainer: its context, and what is cleaned up however it ends."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator

from pytorch_accelerated.data.adapting import close_loader
from pytorch_accelerated.errors import NonFiniteLossError, StopTrainingError
from pytorch_accelerated.facts.context import Context
from pytorch_accelerated.facts.error_notes import add_place, show_note
from pytorch_accelerated.facts.settings import TrainSettings
from pytorch_accelerated.processes.ranks import UnevenRanks
from pytorch_accelerated.tracking.loss import LossTracker
from pytorch_accelerated.tracking.step_records import EpochClock
from pytorch_accelerated.training import rescuing
from pytorch_accelerated.training.emitting import Emitter
from pytorch_accelerated.training.evaluation_sets import EvaluationSets
from pytorch_accelerated.training.reports import LossReports, ShownWarnings
from pytorch_accelerated.training.saves import Saves
from pytorch_accelerated.training.states import States
from pytorch_accelerated.training.stopping import Stopping


def new_context(before: Context, settings: TrainSettings, kind_of_states: type[States]) -> Context:
    """The context of a call with `settings`, which continues what is in that of the call before.

    Args:
        before: of the last call of the trainer.
        settings: the arguments of the call.
        kind_of_states: how training states are written and loaded.
    """
    ranks = before.ranks
    context = type(before)(
        before.trainer,
        before.holder,
        before.given,
        before.accelerator,
        ranks,
        before.model,
        before.optimizer,
        before.scheduler,
        before.history,
        before.callbacks,
        before.config,
        before.state,
        dataclasses.replace(before.loaders),  # those of the last call stay as they are
        settings,
        before.seed,
        before.number,
        before.epochs_before,
        losses=LossTracker(),
        gradient_norms=LossTracker(),
        epoch_clock=EpochClock(1),
        saves=Saves(ranks),
        shown_warnings=ShownWarnings(),
    )
    if ranks.count > 1:
        context.uneven = UnevenRanks(ranks)
    context.emitter = Emitter(context)
    context.stopping = Stopping(context)
    context.states = kind_of_states(context)
    context.reports = LossReports(context)
    context.evaluation_sets = EvaluationSets(context)
    return context


@contextlib.contextmanager
def at_work(context: Context) -> Iterator[Context]:
    """Context for everything that a call does: tells callbacks about exceptions, and cleans up."""
    stopping, saves = context.stopping, context.saves
    with context.shown_warnings.counted(), stopping.signals as signals, contextlib.ExitStack() as cleaning_up:
        context.is_at_work = True
        # In reverse order; each is done whatever happens in those before: a second Ctrl-C, or torch's report of a
        # dead loader process, can come at any moment.
        cleaning_up.callback(setattr, context, "is_at_work", False)
        cleaning_up.callback(lambda: close_loader(context.loaders.train))
        cleaning_up.callback(_close_eval_loaders, context)
        cleaning_up.callback(_release, context)
        cleaning_up.callback(saves.release_folders)
        cleaning_up.callback(saves.close)
        cleaning_up.callback(lambda: None if context.page is None else context.page.close())
        try:
            yield context
            if signals.agreed:
                context.ranks.wait()  # launchers end the others as soon as one exits
        except NonFiniteLossError:
            raise
        except BaseException as exception:
            if isinstance(exception, Exception):
                updates = context.state.updates
                add_place(exception, f"epoch {context.history.current_epoch}, after {updates} updates of the run")
            rescuing.save_after(context, exception)
            show_note(exception)
            error = rescuing.explained(context, exception)
            rescuing.tell_of(context, error)
            if error is exception:
                raise
            raise error from exception
    if signals.agreed or signals.number:
        raise signals.exit(saves.saved_to)


@contextlib.contextmanager
def ending(context: Context, hook: Callable[[], None], event: str) -> Iterator[None]:
    """Context for a training or evaluation run: its last hook and event, unless an exception ends it.

    A non-finite loss is raised after them.
    """
    stop: StopTrainingError | NonFiniteLossError | None = None
    failure: NonFiniteLossError | None = None
    try:
        yield
    except StopTrainingError as error:
        stop = error
    except NonFiniteLossError as error:
        stop = failure = error
    if stop is not None:
        context.emitter.emit("on_stop_training_error", reason=str(stop), failure=failure)
    if context.training is not None:
        failure = context.training.close(failure)
    _release(context)
    context.emitter.defer(hook)
    context.emitter.emit(event)
    if failure is not None:
        raise failure


def _close_eval_loaders(context: Context) -> None:
    with contextlib.ExitStack() as closing:
        for loader in context.loaders.all_eval:
            closing.callback(close_loader, loader)


def _release(context: Context) -> None:
    if context.training is None:
        context.release_model()
    else:
        context.training.release()
