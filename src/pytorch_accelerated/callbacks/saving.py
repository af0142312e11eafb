"""Saving while training: the best model, the whole state of a run to resume from, the checkpoints of a schedule."""

from __future__ import annotations

import copy
import dataclasses
import functools
import os
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytorch_accelerated.callbacks.stopping import KINDS_OF_BEST, MetricJudge, refuse_unrecorded
from pytorch_accelerated.errors import (
    CheckpointError,
    ConfigurationError,
    DuplicateCallbackError,
    InvalidCheckpointError,
)
from pytorch_accelerated.facts.optional import require
from pytorch_accelerated.loop.callback import StateSaver, TrainerCallback
from pytorch_accelerated.loop.handler import CallbackHandler
from pytorch_accelerated.loop.reports import LossReports
from pytorch_accelerated.record.step_records import Pace
from pytorch_accelerated.record.text import folded, format_number
from pytorch_accelerated.record.warning import warn_user
from pytorch_accelerated.record.watching import WatchedMetric
from pytorch_accelerated.schedulers.wsd_scheduler import WSDLrScheduler
from pytorch_accelerated.states.disk import is_url, resolved, working_folder
from pytorch_accelerated.states.loading import load_run
from pytorch_accelerated.states.policy import Retention, SavePolicy, judged_states
from pytorch_accelerated.states.publish import remove_state
from pytorch_accelerated.states.training_state import entries_of_state
from pytorch_accelerated.states.verify import list_named_states

if TYPE_CHECKING:
    from pytorch_accelerated.loop.callback import Trainer
    from pytorch_accelerated.ranks.ranks import Ranks


_told: set[Path] = set()


class _StateIsGone(Exception):
    """The training state that a best value belongs to can't be read any more."""


@dataclasses.dataclass(eq=False, repr=False)
class SaveBestModelCallback(MetricJudge):
    """Saves the model whenever a metric has a new best value, and loads the best model at the end of the run.

    Values are judged at the end of each epoch, and after evaluations within an epoch if they recorded the metric, but
    not in `Trainer.evaluate`. NaN is never better, and a model with parameters that are not finite is never saved. The
    best checkpoint is loaded however a training run ends, except by an exception other than `NonFiniteLossError`.

    The first rank of each node writes the file with `Trainer.save_checkpoint`, and adds the value under the name of the
    metric, and ``epoch``.

    >>> callbacks = [..., SaveBestModelCallback("best.pt", watch_metric="eval_accuracy", greater_is_better=True)]

    Args:
        save_path: the path of the file, which each better model replaces as a whole. A line is printed when the run
            starts if the file exists from an earlier run.
        watch_metric: the metric's name in the run history.
        greater_is_better: whether larger values are better.
        reset_on_train: whether each call of `Trainer.train` starts a new search for the best model. A resumed run
            always continues its search.
        save_optimizer: whether the optimizer's state is saved and loaded with the model.
        save_scheduler: whether the scheduler's state is saved and loaded with the model.
        load_saved_checkpoint: whether to load the best checkpoint at the end of a training run.

    Attributes:
        best_metric: the best value so far, or None.
        best_metric_epoch: the epoch of the best value, from 1, or None.
    """

    save_path: str | Path = "best_model.pt"
    watch_metric: str = "eval_loss_epoch"
    greater_is_better: bool = False
    reset_on_train: bool = True
    save_optimizer: bool = True
    save_scheduler: bool = True
    load_saved_checkpoint: bool = True

    best_metric: float | None = dataclasses.field(default=None, init=False)
    best_metric_epoch: int | None = dataclasses.field(default=None, init=False)

    _told_apart_by = "save_path"
    _kinds = KINDS_OF_BEST
    _lost: list[Any] | None = None  # value and epoch of one whose weights are gone

    def on_training_run_start(self, trainer: Trainer, **kwargs: Any) -> None:
        """Check path and metric; forget the best value of an earlier run, or one whose file is missing."""
        self._refuse_shared_path(trainer.callback_handler)
        super().on_training_run_start(trainer, **kwargs)
        # Whether there is a best one is the same on all ranks; whether they see the file may not be.
        if self.best_metric is not None and not trainer.run_context.parts.ranks.from_first(
            self._absolute(self.save_path).is_file()
        ):
            warn_user(
                trainer.run_context.parts.ranks,
                f"The best model so far ({self.watch_metric} {self.best_metric} in epoch {self.best_metric_epoch}) is "
                f"not in {self.save_path} any more, so the search starts again. Put the file back to continue it.",
            )
            # Only a value that a file proves may decide: a best value without its weights would keep worse ones away.
            self._lose(self.best_metric, self.best_metric_epoch)
            self._forget_best()
        if self.best_metric is None:
            tell_of_earlier(
                trainer.print, [self._absolute(self.save_path)], "the best model of this run will replace it"
            )

    def on_training_run_end(self, trainer: Trainer, **kwargs: Any) -> None:
        """Load the best checkpoint, on every rank; say if the weights of a better one are gone."""
        self._tell_of_lost(trainer.run_context.parts.ranks)
        if not self.load_saved_checkpoint or (self.best_metric is None and self._lost is not None):
            return
        if self.best_metric is None:
            warn_user(
                trainer.run_context.parts.ranks,
                f"The model has the weights of the last update: {self.watch_metric!r} had no value but NaN.",
            )
            return
        trainer.run_context.parts.ranks.wait()  # other ranks read what the first of their node may still be writing
        trainer.load_checkpoint(self._absolute(self.save_path))
        value = f"{self.watch_metric} {format_number(self.best_metric)}"
        trainer.print(folded(f"Loaded the weights of epoch {self.best_metric_epoch} ({value}) from {self.save_path}"))

    def saved_places(self) -> dict[str, str]:
        """The best model's file, once there is one; for the summary of a run."""
        return {} if self.best_metric is None else {"best model": str(self.save_path)}

    def _judge(self, trainer: Trainer, values: list[float], state: Path | None = None) -> None:
        if values and self._watched.is_better(values[-1], self.best_metric):
            epoch = trainer.run_history.current_epoch
            try:
                with trainer.run_context.control.saves.saving(self._absolute(self.save_path), goes_on=True):
                    self._save(trainer, {self.watch_metric: values[-1], "epoch": epoch}, state)
                    self.best_metric, self.best_metric_epoch = values[-1], epoch
            except _StateIsGone as error:  # no save was tried, so an earlier failure still counts
                warn_user(trainer.run_context.parts.ranks, f"The best model so far is lost: keep more states. {error}")
                self._lose(values[-1], epoch)

    def state_dict(self) -> dict[str, Any]:
        """The best value so far, and one whose weights are gone."""
        return super().state_dict() if self._lost is None else {**super().state_dict(), "lost": self._lost}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue the search of the run that is being resumed."""
        super().load_state_dict(state)
        self._lost = state.get("lost")

    def _start_over(self) -> None:
        if self.reset_on_train:
            self._forget_best()
            self._lost = None

    def _tell_of_lost(self, ranks: Ranks) -> None:
        """Say that the best value of the run, by which callbacks may have stopped it, doesn't belong to the weights."""
        if self._lost is not None and self._watched.is_better(self._lost[0], self.best_metric):
            warn_user(
                ranks,
                f"The best {self.watch_metric} was {format_number(self._lost[0])}, in epoch {self._lost[1]}, but its "
                f"weights are gone: neither the model nor {self.save_path} has them.",
            )

    def _lose(self, value: float, epoch: int | None) -> None:
        if self._lost is None or self._watched.is_better(value, self._lost[0]):
            self._lost = [value, epoch]

    def _save(self, trainer: Trainer, entries: dict[str, Any], state: Any = None) -> None:
        """Write the checkpoint with these additional entries, of a training state or of the model as it is now."""
        path, optimizer, scheduler = self._absolute(self.save_path), self.save_optimizer, self.save_scheduler
        if state is None:
            trainer.save_checkpoint(path, entries, save_optimizer=optimizer, save_scheduler=scheduler)
            return
        names = ["model", *["optimizer"] * optimizer, *["scheduler"] * scheduler]
        saves = trainer.run_context.control.saves
        try:
            saves.write_portable(path, lambda: {**entries_of_state(state, names), **entries})
        except InvalidCheckpointError as error:
            raise _StateIsGone(error) from error

    def _forget_best(self) -> None:
        self.best_metric = self.best_metric_epoch = None

    def _refuse_shared_path(self, callbacks: Iterable[Any]) -> None:
        savers = [each for each in callbacks if isinstance(each, SaveBestModelCallback)]
        if len({each._absolute(each.save_path).resolve() for each in savers}) < len(savers):
            paths = [str(each.save_path) for each in savers]
            raise DuplicateCallbackError(f"Callbacks would replace each other's file: `save_path` of them is {paths}.")


class SaveTrainingStateCallback(StateSaver):
    """Saves the whole state of a run in folders, from which the run can be resumed as if it had never stopped.

    `save_dir` gets ``epoch_<N>`` after epochs (counted from 1, as in the run history), ``step_<N>`` after optimizer
    updates, and ``final`` at the end of the run, also if the run was stopped early, but not if a loss was not finite.
    A state is never visible before it is complete. To resume, call ``trainer.train(..., resume_from=save_dir)``.

    When a new state is complete, one rank deletes older states in the folder, including those of earlier runs. The
    newest state is always kept, and folders with other names are left alone. While the run lasts, no other run can save
    to the folder.

    With a URL such as ``"s3://bucket/run"`` as `save_dir`, for which fsspec and what it needs for the URL must be
    installed, states are saved to a local folder first, and uploaded in the order of saving while the run continues,
    by the first rank. There, too, a state is complete or not visible; one that is outdated before its turn comes is not
    uploaded. A network that fails is tried again for `storage_timeout`, and then at the next save, with a warning. At
    its end, the run waits until the last state is uploaded. Only one run at a time may save to a URL: the one that
    began first notices the other at its next upload.

    >>> callbacks = [..., SaveTrainingStateCallback("states", save_every_n_minutes=15, max_checkpoints=3)]

    Args:
        save_dir: the folder of the states, or its URL.
        save_every_n_epochs: the number of epochs between two states.
        save_every_n_steps: the number of optimizer updates between two states.
        save_at_end: whether to save ``final`` when the run is complete, or stopped by anything but a signal.
        max_checkpoints: the number of newest states to keep. All states are kept if this and `keep_best` are None.
        keep_best: the number of best states to keep as well. The value of a state is the last one of `watch_metric`
            recorded after the same update, before the state was saved; states without a value are not among the best.
        watch_metric: the metric's name in the run history.
        greater_is_better: whether larger values are better.
        save_every_n_minutes: the minutes between two states, by the clock of rank 0, give or take a second or an
            update; the states are named ``step_<N>``.
        save_on_signal: whether to save ``final`` when SIGTERM, SIGINT, SIGUSR1 or SIGHUP ends the run, whatever
            `save_at_end` says.
        background: whether to continue the run while a state is being written. The run then waits only for a copy in
            host memory, as large as the state; see `Trainer.save_training_state`.
        local_dir: where states are until they are uploaded, if `save_dir` is a URL; the newest stays there. Default: a
            folder for this URL in ``~/.cache/pytorch_accelerated`` (``$XDG_CACHE_HOME``). For a sharded model on
            multiple machines, it must be a folder that they share.
        storage_timeout: seconds for which a request to the storage of a URL is repeated if it fails, and for which it
            may go without moving a byte. A stalled storage ends the run twice as long after its last update.

    Attributes:
        policy: decides when to save.
        retention: decides which states to keep.

    Raises:
        ConfigurationError: if a number is not positive, or `local_dir` is given for a `save_dir` that isn't a URL.
        CheckpointError: from `Trainer.train`, if the last state could not be uploaded. It is kept in `local_dir`.
    """

    ranks_agree_after_each_update = False
    takes_part_in_preflight = False
    recorded_names = ()
    _told_apart_by = "save_dir"

    _clock = staticmethod(time.monotonic)
    _is_final_requested = False
    _has_requested = False
    _saved_at: float | None = None
    _pace: Pace | None = None

    def __init__(
        self,
        save_dir: str | Path = "training_states",
        save_every_n_epochs: int | None = None,
        save_every_n_steps: int | None = None,
        save_at_end: bool = True,
        max_checkpoints: int | None = None,
        *,
        keep_best: int | None = None,
        watch_metric: str = "eval_loss_epoch",
        greater_is_better: bool = False,
        save_every_n_minutes: float | None = None,
        save_on_signal: bool = True,
        background: bool = False,
        local_dir: str | Path | None = None,
        storage_timeout: float = 120.0,
    ) -> None:
        if local_dir is not None and not is_url(save_dir):
            raise ConfigurationError(
                f"`local_dir` is {local_dir}, but `save_dir` is local too: {save_dir}. Leave it out."
            )
        self.save_dir = save_dir
        self.local_dir = None if local_dir is None else self._absolute(local_dir)
        self.storage_timeout = storage_timeout
        self.policy = SavePolicy(
            every_n_updates=save_every_n_steps, every_n_epochs=save_every_n_epochs, every_n_minutes=save_every_n_minutes
        )
        self.retention = Retention(last=max_checkpoints, best=keep_best, greater_is_better=greater_is_better)
        self.watch_metric = watch_metric
        self.save_at_end = save_at_end
        self.save_on_signal = save_on_signal
        self.background = background

    def on_training_run_start(self, trainer: Trainer, **kwargs: Any) -> None:
        """Check the metric and the folder, and start the clock."""
        if self.retention.best is not None:
            self._watched.check_has_evaluation(trainer.eval_dataset)
            refuse_unrecorded(trainer, self.watch_metric)
            self._watched.check_direction(trainer.run_context.parts.ranks, type(self).__name__)
        saves = trainer.run_context.control.saves
        saves.claim_folder(self.folder)  # two runs that save there would delete each other's states
        earlier: Sequence[str] = ()
        if is_url(self.save_dir):
            metric_name = None if self.retention.best is None else self.watch_metric
            store = _object_storage().Store(str(self.save_dir), self.storage_timeout)
            uploads = _object_storage().Uploads(store, self.folder, self.retention, metric_name)
            saves.upload(uploads)
            earlier = uploads.earlier
        if trainer.run_state.updates == 0:  # else the run was resumed
            fate = "replace those of the same names" if self.retention.keeps_all else "replace or delete earlier states"
            remedy = (
                f"pass `resume_from={str(self.save_dir)!r}` to continue that run, or another `save_dir` to keep them"
            )
            if earlier:
                found = f"{self.save_dir} has states of an earlier run, the last of them {earlier[-1]}"
                trainer.print(folded(f"{found}: this run will {fate}; {remedy}"))
            else:
                states = [folder for folder, _ in list_named_states(self.folder)]
                tell_of_earlier(trainer.print, states, f"this run will {fate}; {remedy}")
        self._is_final_requested = self._has_requested = False
        self._saved_at = None
        # The writer calls it when a state is complete and before the next begins, so only whole states are counted.
        if trainer.run_context.parts.ranks.is_first:
            saves.writer.after_each.append(functools.partial(self._apply_retention, saves.uploads))

    def on_optimizer_step_end(self, trainer: Trainer, **kwargs: Any) -> None:
        """Save if the number of updates or minutes says so."""
        updates, minutes = trainer.run_state.updates, self.policy.every_n_minutes
        is_late = (
            minutes is not None
            and self._agreed_seconds_since_save(trainer.run_context.parts.ranks, updates) >= 60 * minutes
        )
        every = self.policy.every_n_updates
        if is_late or (every is not None and updates % every == 0):
            self._request(trainer, f"step_{updates}")

    def on_training_run_epoch_end(self, trainer: Trainer, **kwargs: Any) -> None:
        """Save if the number of epochs says so, and after the last epoch."""
        epoch, every = trainer.run_history.current_epoch, self.policy.every_n_epochs
        if self.retention.best is not None:
            history, ranks = trainer.run_history, trainer.run_context.parts.ranks
            # Retention reads the values from the states, later and on one rank. A name that nothing records, or a
            # value that can't be compared, must fail here, on all ranks.
            self._watched.check_recorded(history, ranks)
            self._watched.new_values(history, ranks, self.state_key)
        if every is not None and epoch % every == 0:
            self._request(trainer, f"epoch_{epoch}")
        if self.save_at_end and trainer.run_context.is_last_epoch:
            self._request_final(trainer)

    def on_stop_training_error(self, trainer: Trainer, **kwargs: Any) -> None:
        """Save where the run stopped. After a loss that is not finite, the trainer discards the request."""
        if self.save_on_signal if trainer.run_context.control.stopping.signals.agreed else self.save_at_end:
            self._request_final(trainer)

    def saved_places(self) -> dict[str, str]:
        """The folder of the training states, once there is one; for the summary of a run."""
        has_saved = self._has_requested and bool(list_named_states(self.folder))
        return {"training states": str(self.save_dir)} if has_saved else {}

    @property
    def folder(self) -> Path:
        """The local folder of the states: `save_dir`, or where they are until they are uploaded."""
        if not is_url(self.save_dir):
            return self._absolute(self.save_dir)
        local = _object_storage().default_local_folder(str(self.save_dir)) if self.local_dir is None else self.local_dir
        return Path(local)

    @property
    def _watched(self) -> WatchedMetric:
        return WatchedMetric(self.watch_metric, self.retention.greater_is_better)

    def _request(self, trainer: Trainer, name: str) -> None:
        trainer.save_training_state(self.folder / name, background=self.background)
        self._has_requested = True
        self._saved_at = self._clock()

    def _request_final(self, trainer: Trainer) -> None:
        is_training = trainer.run_context.parts.loaders.train is not None  # an evaluation can be stopped, too
        if is_training and not self._is_final_requested:
            self._is_final_requested = True
            self._request(trainer, "final")

    def _agreed_seconds_since_save(self, ranks: Ranks, updates: int) -> float:
        """Seconds by the clock of rank 0, exchanged about once a second. All ranks must call this after each update."""
        if self._saved_at is None or self._pace is None:
            self._saved_at = self._clock()
            self._pace = Pace(1.0, self._clock, updates)
        if not self._pace.is_due(updates):
            return 0.0
        seconds: float
        seconds, between = ranks.from_first((self._clock() - self._saved_at, self._pace.proposal(updates)))
        self._pace.go_on(updates, between)
        return seconds

    def _apply_retention(self, uploads: Mapping[Path, Any]) -> None:
        if (own := uploads.get(resolved(self.folder))) is not None:  # they apply it
            own.start()
            return
        if self.retention.keeps_all:
            return
        metric_name = None if self.retention.best is None else self.watch_metric
        for state in self.retention.states_to_delete(
            judged_states(list_named_states(self.folder), metric_name=metric_name)
        ):
            try:
                remove_state(state)
            except CheckpointError as error:
                warnings.warn(f"A training state that is no longer needed cannot be deleted. {error}", stacklevel=2)


def tell_of_earlier(print_on_node: Callable[[str], None], paths: Sequence[Path], fate: str) -> None:
    """Print one line on each node, once in a process, if there are files or folders of an earlier run.

    Args:
        print_on_node: of the trainer of the run, which is not a resumed one.
        paths: where they may be; absolute.
        fate: says what this run will do to them.
    """
    times = {path.stat().st_mtime: path for path in paths if path.exists()}
    if not times or times[max(times)] in _told:  # in a notebook, a cell is run many times
        return
    newest = times[max(times)]
    _told.add(newest)
    shown = str(newest).removeprefix(os.path.join(working_folder(), ""))
    moment = f"{datetime.fromtimestamp(max(times)):%Y-%m-%d %H:%M}"
    print_on_node(folded(f"{shown} is from an earlier run ({moment}): {fate}"))


@dataclasses.dataclass(eq=False, repr=False)
class WSDCheckpointCallback(TrainerCallback):
    """Saves at the checkpoints of a `WSDLrScheduler`: where a decay begins, and where it ends.

    `save_dir` gets training states ``checkpoint_<step>_wsd_pre_decay``, from which a longer run can start, and
    files ``checkpoint_<step>_wsd_post_decay.pt`` of `Trainer.save_checkpoint`, which have the better models. A step is
    an applied optimizer update.

    To train on, pass either as `initial_checkpoint`, with ``is_continuation_from_checkpoint=True`` for the scheduler.
    The new run has the weights, the optimizer and, of a training state, the random generators. It counts from 0: its
    number of epochs or steps counts the new part. For a run that equals an uninterrupted one of a greater length,
    resume from the training state: ``train(..., resume_from=...)`` with the number of epochs of the whole.

    >>> callbacks = [..., WSDCheckpointCallback("checkpoints")]

    Args:
        save_dir: the folder of the checkpoints.
        save_optimizer: whether the files include the optimizer's state.
        save_scheduler: whether the files include the scheduler's state.
        initial_checkpoint: a training state, or a file of `Trainer.save_checkpoint`, to begin with, unless the run is
            resumed.
    """

    ranks_agree_after_each_update = False
    takes_part_in_preflight = False
    _told_apart_by = "save_dir"

    save_dir: str | Path = "checkpoints"
    save_optimizer: bool = True
    save_scheduler: bool = True
    initial_checkpoint: str | Path | None = None
    _last_step = 0

    def on_training_run_start(self, trainer: Trainer, **kwargs: Any) -> None:
        """Check the scheduler, and load `initial_checkpoint`.

        Raises:
            ConfigurationError: if the scheduler is not a `WSDLrScheduler`.
            CheckpointError: if the state is missing, damaged, or of another model.
        """
        scheduler = _checked(trainer.scheduler)
        trainer.run_context.control.saves.claim_folder(self._absolute(self.save_dir))
        is_resumed = trainer.run_state.updates > 0
        if self.initial_checkpoint is not None and not is_resumed:
            _load_initial(trainer, self._absolute(self.initial_checkpoint))
            scheduler.step_update(0)
        elif not is_resumed:
            earlier = list(self._absolute(self.save_dir).glob("checkpoint_*_wsd_*"))
            tell_of_earlier(trainer.print, earlier, "this run will replace those at the same steps")
        self._last_step = scheduler.get_current_step()

    def on_optimizer_step_end(self, trainer: Trainer, **kwargs: Any) -> None:
        """Save if a decay begins or ends here."""
        scheduler = _checked(trainer.scheduler)
        step = scheduler.get_current_step()
        if step == self._last_step:
            return  # the update was skipped
        self._last_step = step
        for period in scheduler.get_decay_info():
            if step == period["pre_decay_step"]:
                trainer.save_training_state(self._absolute(self.save_dir) / f"checkpoint_{step}_wsd_pre_decay")
            if step == period["period_end"]:
                path = self._absolute(self.save_dir) / f"checkpoint_{step}_wsd_post_decay.pt"
                with trainer.run_context.control.saves.saving(path, goes_on=True):
                    trainer.save_checkpoint(
                        path,
                        {"step": step, "epoch": trainer.run_history.current_epoch},
                        save_optimizer=self.save_optimizer,
                        save_scheduler=self.save_scheduler,
                    )


def _load_initial(trainer: Trainer, source: str | Path) -> None:
    """Load the weights, the optimizer and the generators of a training state or of a portable file."""
    run = trainer.run_context
    if run.parts.ranks.from_first(Path(source).is_file()):
        trainer.load_checkpoint(source, load_scheduler=False)
        return
    state = run.control.states.find(source, must_exist=True)
    aside = run.copied(scheduler=None, callbacks=CallbackHandler(), history=copy.deepcopy(run.parts.history))
    aside.parts.reports = LossReports(aside.parts, run.control.emitter)
    load_run(aside, state, restores_position=False, read=run.control.states.take_read(state))


def _checked(scheduler: Any) -> WSDLrScheduler:
    if not isinstance(scheduler, WSDLrScheduler):
        raise ConfigurationError(
            f"WSDCheckpointCallback needs a WSDLrScheduler, but the scheduler of this run is {scheduler!r}. "
            "Pass `create_scheduler_fn=WSDLrScheduler.create_scheduler_fn()` to `train`, or remove the callback."
        )
    return scheduler


def _object_storage() -> Any:
    return require("pytorch_accelerated.extras.object_storage", needed_by="A URL for training states")
