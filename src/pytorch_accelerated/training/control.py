"""What comes between the steps of a run: events, and wishes to stop, to evaluate or to save, until they are acted on.

Several ranks do all of it together. `docs/design/stopping.md` and `docs/design/signals.md` say why it is built like
this.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from pytorch_accelerated.callbacks.handler import CallbackHandler
from pytorch_accelerated.checkpointing.background import BackgroundWriter
from pytorch_accelerated.checkpointing.folder_lock import FolderLock
from pytorch_accelerated.checkpointing.reading import resolved
from pytorch_accelerated.checkpointing.shared_disk import StateFolders
from pytorch_accelerated.data.updates import Round
from pytorch_accelerated.errors import ConfigurationError, NonFiniteLossError, StopTrainingError
from pytorch_accelerated.tracking.timing import Pace
from pytorch_accelerated.training.hooks import TrainerHooks
from pytorch_accelerated.training.run_state import RunState
from pytorch_accelerated.training.settings import TrainSettings
from pytorch_accelerated.training.signals import SignalWatch

# How long several ranks may go on when one of them shall stop for what nothing in the update could have asked for.
_SECONDS_BETWEEN_AGREEMENTS = 0.25


class RunControl(TrainerHooks):
    """Fires the events, keeps what is asked for meanwhile, and acts on it where the loop says that it may."""

    callback_handler: CallbackHandler
    run_state: RunState
    _settings: TrainSettings
    _eval_dataloader: Any

    def _reset_control(self) -> None:
        """Forget what an earlier run was asked for."""
        self._stop: StopTrainingError | None = None
        self._stop_pace = Pace(_SECONDS_BETWEEN_AGREEMENTS)
        self._deadline: float | None = None
        self._signals = SignalWatch()
        self._finishes_passes = False  # in what no resumed run would repeat
        self._evaluation_requested = False
        self._requested_states: list[tuple[Path, dict[str, Any], bool]] = []
        self._defers_saves = False  # only while training there are moments that are not to be saved
        self._state_writer = BackgroundWriter()  # used on the rank that writes
        self._saves_in_background = False  # has been asked to, on all ranks
        self._saved_to: Path | None = None  # when the run was stopped
        self._locks: dict[Path, FolderLock] = {}
        self._state_folders = StateFolders()

    # ---------------------------------------------------------------------------------------------------------- events

    def _emit(self, event: str, **kwargs: Any) -> None:
        self.callback_handler.call_event(event, self, **kwargs)

    def _fire(self, event: str, **kwargs: Any) -> None:
        """Fire an event; a wish to stop is kept until all ranks can stop together."""
        try:
            if self.callback_handler.acts_at[event]:
                self.callback_handler.call_event(event, self, **kwargs)
        except StopTrainingError as error:
            self._stop = self._stop or error

    def _fire_in_pass(self, event: str, **kwargs: Any) -> None:
        """Fire an event of an evaluation or prediction: several ranks finish it together, one may give it up."""
        if self._ranks.count == 1:
            self._emit(event, **kwargs)
        else:
            self._fire(event, **kwargs)

    def _moment(self, hook: str, event: str, **kwargs: Any) -> None:
        """A method and the event of the same moment."""
        self._guarded(getattr(self, hook))
        self._fire(event, **kwargs)

    def _guarded(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """Call a hook; a wish to stop is kept until all ranks can stop together."""
        try:
            function(*args, **kwargs)
        except StopTrainingError as error:
            self._stop = self._stop or error
        except Exception as error:
            self._note_failure(error, function)
            raise

    # -------------------------------------------------------------------------------------------------------- stopping

    def _stop_if_asked(self) -> None:
        """Stop if any rank wants to, on all ranks for the first reason. Must be called by all ranks."""
        if self._deadline is not None and time.monotonic() >= self._deadline and self._ranks.is_first:
            self._stop = self._stop or StopTrainingError(f"`max_duration` ({self._settings.max_duration}) is over.")
        is_wanted = self._stop is not None or self._signals.number or self._state_writer.failure is not None
        if self._finishes_passes or (self._ranks.count == 1 and not is_wanted):
            return
        if self._agree_to_stop(self._stop_pace, self.run_state.updates, self._stop is not None):
            stop, self._stop = self._stop, None
            reasons = self._ranks.exchange("" if stop is None else str(stop))
            raise StopTrainingError(next(filter(None, [self._signals.reason, *reasons]), "")) from stop

    def _agree_to_stop(self, pace: Pace, done: int, wants_to_stop: bool) -> bool:
        """Whether any rank wants to stop or has got a signal, after so much is `done`. Must be called by all ranks."""
        has_failed = self._state_writer.failure is not None
        everyones = self._ranks.exchange_numbers([pace.proposal(done), wants_to_stop, has_failed, self._signals.number])
        proposals, wishes, failures, signals = zip(*everyones, strict=True)
        pace.go_on(done, between=proposals[0])
        if any(failures):
            self._finish_saves()  # raises what went wrong, on all ranks
        return self._signals.agree(signals) or any(wishes)

    def _until_signal(self, rounds: Iterable[Round], give_up: Callable[[str], BaseException]) -> Iterator[Round]:
        """The rounds of a pass; all ranks give it up before the same one if a signal has come to any of them.

        Args:
            rounds: of the pass.
            give_up: makes what is raised then, from the reason.
        """
        pace = Pace(_SECONDS_BETWEEN_AGREEMENTS)
        for number, round_ in enumerate(rounds):
            is_due = self._signals.number if self._ranks.count == 1 else pace.is_due(number)
            if is_due and not self._finishes_passes and self._agree_to_stop(pace, number, False):
                raise give_up(self._signals.reason)
            yield round_

    @contextlib.contextmanager
    def _finishing_passes(self) -> Iterator[None]:
        """Evaluations and predictions that user code makes are finished: no resumed run would repeat them."""
        before, self._finishes_passes = self._finishes_passes, True
        try:
            yield
        finally:
            self._finishes_passes = before

    @contextlib.contextmanager
    def _ending(self, hook: str, event: str) -> Iterator[None]:
        """The events that end a run, unless an exception does; a loss that is not finite is raised after them."""
        stop: StopTrainingError | NonFiniteLossError | None = None
        failure: NonFiniteLossError | None = None
        try:
            yield
        except StopTrainingError as error:
            stop = error
        except NonFiniteLossError as error:
            stop = failure = error
        if stop is not None:
            self._fire("on_stop_training_error", reason=str(stop))
        self._evaluation_requested = self._defers_saves = False
        if failure is not None:
            self._requested_states.clear()  # nothing is saved from a model that may be spoilt
        states = [folder for folder, *_ in self._requested_states]
        try:
            self._write_requested_states()
        except NonFiniteLossError as error:  # the parameters are
            failure = error
        self._finish_saves()
        self._saved_to = states[-1] if states and failure is None else None
        self._release_model()
        self._moment(hook, event)
        if failure is not None:
            raise failure

    # -------------------------------------------------------------------------------------------------------- requests

    def _act_on_requests(self) -> None:
        """Do what callbacks asked for, in a fixed order."""
        state = self.run_state
        if self._evaluation_requested or state.is_evaluation_due:
            self._evaluation_requested, state.is_evaluation_due = False, True
            self._evaluate_as_requested()
            state.is_evaluation_due = False
        self._write_requested_states()

    def _evaluate_as_requested(self) -> None:
        if self._eval_dataloader is None:
            raise ConfigurationError(
                "An evaluation was requested during training, but there is no evaluation dataset. Pass `eval_dataset` "
                "to `train`."
            )
        self._run_eval_epoch(self._eval_dataloader, is_intermediate=True)

    def _write_requested_states(self) -> None:
        while self._requested_states:
            self._write_training_state(*self._requested_states.pop(0))

    def _finish_saves(self) -> None:
        """Wait for states that are being written in the background. Must be called by all ranks."""
        if self._saves_in_background:
            self._ranks.do_on_all(self._state_writer.wait)

    def _claim_folder(self, folder: str | Path, argument: str = "save_dir") -> None:
        """Keep other runs from saving to `folder` until this one is over. Must be called by all ranks.

        Raises:
            CheckpointError: if another run saves to it.
        """
        path = resolved(folder)
        if path not in self._locks:
            lock = FolderLock(path, argument)
            self._ranks.do_on_first(lock.acquire)
            self._locks[path] = lock

    def _release_folders(self) -> None:
        while self._locks:
            self._locks.popitem()[1].release()

    # --------------------------------------------------------------------------------------------- what others provide

    def _run_eval_epoch(self, valid_dl: Any, is_training: bool = True, is_intermediate: bool = False) -> None:
        raise NotImplementedError

    def _note_failure(self, error: Exception, hook: Callable[..., Any]) -> None:
        raise NotImplementedError

    def _release_model(self) -> None:
        raise NotImplementedError

    def _write_training_state(self, output_dir: Path, extra: dict[str, Any], background: bool) -> None:
        raise NotImplementedError
