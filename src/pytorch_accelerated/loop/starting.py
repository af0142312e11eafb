"""Begins and ends a call of the trainer: its context, and what is done however it ends.

No error in what is done after an exception hides that exception.
"""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Callable, Iterator

from pytorch_accelerated.data.building import close_loader
from pytorch_accelerated.data.updates import Loaders
from pytorch_accelerated.errors import NonFiniteLossError, StopTrainingError
from pytorch_accelerated.facts.error_notes import add_place, show_note
from pytorch_accelerated.facts.settings import TrainSettings
from pytorch_accelerated.loop.context import Context, Control, Parts
from pytorch_accelerated.loop.evaluation_sets import EvaluationSets
from pytorch_accelerated.loop.reports import LossReports
from pytorch_accelerated.loop.states import Saves, States
from pytorch_accelerated.loop.stopping import Emitter, Stopping
from pytorch_accelerated.ranks.preparation import OptimizerMode
from pytorch_accelerated.ranks.ranks import UnevenRanks, is_lost_contact, lost_peer_error
from pytorch_accelerated.record.text import show


def new_context(before: Context, settings: TrainSettings, kind_of_states: type[States]) -> Context:
    """The context of a call with `settings`, which continues the context of the call before.

    Args:
        before: of the last call of the trainer.
        settings: the arguments of the call.
        kind_of_states: how training states are written and loaded.
    """
    asked, parts, control = copy.copy(before.asked), before.parts.of_next_call(), Control()
    context = Context(before.trainer, before.holder, asked, parts, control)
    asked.settings, asked.left_out, asked.resumed_from = settings, (), None
    ranks = parts.ranks
    parts.mode = OptimizerMode()
    if ranks.count > 1:
        parts.uneven = UnevenRanks(ranks)
    control.emitter = Emitter(context.trainer, parts)
    control.stopping = Stopping(asked, parts, control)
    control.saves, control.states = Saves(context), kind_of_states(context)
    control.evaluation_sets = EvaluationSets(context.trainer, parts, control.stopping)
    parts.reports = LossReports(parts, control.emitter)
    return context


@contextlib.contextmanager
def at_work(context: Context) -> Iterator[Context]:
    """Context manager for everything that a call does: tells callbacks about exceptions, and cleans up."""
    parts, control = context.parts, context.control
    stopping, saves = control.stopping, control.saves
    with stopping.signals as signals, contextlib.ExitStack() as cleaning_up:
        control.is_at_work = True
        # In reverse order; each is done whatever happens in those before: a second Ctrl-C, or torch's report of a
        # dead loader process, can come at any moment.
        cleaning_up.callback(setattr, control, "is_at_work", False)
        cleaning_up.callback(lambda: close_loader(parts.loaders.train))
        cleaning_up.callback(_close_eval_loaders, parts.loaders)
        cleaning_up.callback(_release, context)
        cleaning_up.callback(saves.release_folders)
        cleaning_up.callback(saves.close)
        cleaning_up.callback(lambda: None if context.page is None else context.page.close())
        try:
            yield context
            saves.end()
            if signals.agreed:
                parts.ranks.wait()  # launchers end the others as soon as one exits
        except NonFiniteLossError:
            raise
        except BaseException as exception:
            if isinstance(exception, Exception):
                updates = parts.state.updates
                add_place(exception, f"epoch {parts.history.current_epoch}, after {updates} updates of the run")
            show_note(exception)
            error = _explained(parts, saves, exception)
            _tell_of(control.emitter, error)
            if error is exception:
                raise
            raise error from exception
    if signals.agreed or signals.number:
        if saves.saved_to is not None:
            context.print(f"To continue: `train(..., {control.training.name_of_resume}={str(saves.saved_to)!r})`")
        raise signals.exit(saves.saved_to)


@contextlib.contextmanager
def ending(context: Context, hook: Callable[[], None], event: str) -> Iterator[None]:
    """Context manager for a training or evaluation run: its last hook and event, unless an exception ends it.

    A non-finite loss is raised after them.
    """
    control = context.control
    stop: StopTrainingError | NonFiniteLossError | None = None
    failure: NonFiniteLossError | None = None
    try:
        yield
    except StopTrainingError as error:
        stop = error
    except NonFiniteLossError as error:
        stop = failure = error
    if stop is not None:
        control.emitter.emit("on_stop_training_error", reason=str(stop), failure=failure)
    if control.training is not None:
        failure = control.stopping.failure = control.training.close(failure)
    _release(context)
    control.emitter.announce(hook, event)
    if failure is not None:
        raise failure


def _close_eval_loaders(loaders: Loaders) -> None:
    with contextlib.ExitStack() as closing:
        for loader in loaders.all_eval:
            closing.callback(close_loader, loader)


def _release(context: Context) -> None:
    control = context.control
    if control.training is None:
        context.parts.release_model()
    else:
        control.training.release()


def _explained(parts: Parts, saves: Saves, exception: BaseException) -> BaseException:
    """The error to raise for `exception`: a better one, which is printed, if torch only says a connection broke."""
    ranks = parts.ranks
    if ranks.count == 1 or not is_lost_contact(exception):
        return exception
    updates, newest = parts.state.updates, saves.newest()
    error = lost_peer_error(exception, rank=ranks.index, size=ranks.count, updates=updates, newest=newest)
    # On every rank, and now: the launcher is about to end this process, perhaps before Python prints the exception.
    show(error)
    return error


def _tell_of(emitter: Emitter, exception: BaseException) -> None:
    """Emit `on_exception`."""
    try:
        emitter.emit("on_exception", exception=exception)
    except Exception as error:
        warnings.warn(
            f"A callback failed in `on_exception` with {type(error).__name__}: {error}. What ended the run is "
            f"another exception, a {type(exception).__name__}; callbacks after that one have not been told of it.",
            stacklevel=2,
        )
