"""The callback that logs a run to TensorBoard, MLflow, Weights & Biases and other trackers."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytorch_accelerated.callbacks.base import TrainerCallback
from pytorch_accelerated.callbacks.warning import warn_user
from pytorch_accelerated.checkpointing.matching import require_kinds
from pytorch_accelerated.errors import ConfigurationError
from pytorch_accelerated.progress.text import folded
from pytorch_accelerated.tracking.history import RunHistory
from pytorch_accelerated.tracking.step_records import StepRecord
from pytorch_accelerated.tracking.trackers import (
    OpenRecords,
    Outcome,
    Place,
    Row,
    hyperparameters_of,
    make_trackers,
    new_run_name,
)
from pytorch_accelerated.tracking.values import MetricRecord

if TYPE_CHECKING:
    from accelerate.tracking import GeneralTracker

    from pytorch_accelerated.callbacks.base import Trainer

_PLACES = ("epoch", "update", "samples", "seconds")  # of a step record
_NAMES = {"train_loss": "train/loss", "peak_memory": "train/peak_memory_bytes"}


class TrackerCallback(TrainerCallback):
    """Logs a run to one or several trackers: its hyper-parameters, and all numbers of the run history as they come.

    ::

        Trainer(..., callbacks=[*DEFAULT_CALLBACKS, TrackerCallback(["tensorboard", "mlflow"])])

    The x axis is the number of updates. Metrics have their names in the run history; what is measured within the epochs
    is called ``train/loss``, ``train/learning_rate`` and so on. Only rank 0 logs. A tracker that fails costs one
    warning: the run continues without it. The last lines that a run prints say where its records are.

    A run that is resumed from a training state, or continued with ``reset_run_history=False``, continues its records.
    What was logged after that state was saved is replaced in TensorBoard. In MLflow and W&B, which replace nothing, it
    stays, and is not logged a second time. Other trackers, by name, begin a new record, which starts with the whole
    history; an instance of your own gets again what was logged after that state.

    Args:
        trackers: one or more of "tensorboard", "mlflow", "wandb", "comet_ml", "aim", "clearml", "dvclive", "swanlab"
            and "trackio", or instances of `accelerate.tracking.GeneralTracker`, on which no method was called yet.
        folder: for TensorBoard's runs and the files of W&B and Aim. MLflow writes to the store that it is set to:
            ``mlflow.set_tracking_uri`` or ``MLFLOW_TRACKING_URI``.
        project: MLflow's experiment, W&B's project.
        run_name: the name of the run; default: the time and four random digits. TensorBoard's folder gets a number if
            an earlier run had the same name.
        hyperparameters: values of your own to log with those of the run, by name; nested dicts are joined by dots.
        options: by name of a tracker, keyword arguments of accelerate's class for it, such as
            ``{"wandb": {"tags": ["baseline"]}}``. They replace those that this callback would pass.

    Raises:
        ConfigurationError: a ValueError, for anything else than such names and instances.
        MissingDependencyError: if the package of a tracker is not installed.
    """

    takes_part_in_preflight = False
    ranks_agree_after_each_update = False

    _records: OpenRecords | None = None
    _run_name: str | None = None
    _identities: Mapping[str, str] = {}
    _was_restored = False
    _first_step = 0  # an evaluation after training resets the history, but belongs to the end of the record
    _last_step = 0

    def __init__(
        self,
        trackers: str | GeneralTracker | Sequence[str | GeneralTracker],
        *,
        folder: str | os.PathLike[str] = "runs",
        project: str = "pytorch-accelerated",
        run_name: str | None = None,
        hyperparameters: Mapping[str, Any] | None = None,
        options: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        self._trackers = make_trackers(trackers)
        self.folder = Path(folder)
        self.project = project
        self.run_name = run_name
        self.hyperparameters = dict(hyperparameters or {})
        self._options = dict(options or {})
        names = [tracker.name for tracker in self._trackers]
        if not self._options.keys() <= set(names):
            raise ConfigurationError(f"`options` is for {[*self._options]}, but the trackers are {names}.")

    def log_figure(self, name: str, figure: Any, step: int | None = None) -> None:
        """Log a matplotlib figure to the trackers that take figures: TensorBoard, MLflow and W&B.

        May be called on any rank, but only rank 0 logs. The figure stays open. A tracker without figures is named in
        a warning.

        Args:
            name: such as "confusion matrix".
            figure: a matplotlib figure.
            step: the number of updates; by default those so far.

        Raises:
            ConfigurationError: a ValueError, if no run is going on.
        """
        if self._run_name is None:
            raise ConfigurationError(
                "`TrackerCallback.log_figure` was called before a run, so there is no record to log to. Call it in a "
                "callback that stands behind the TrackerCallback in the list, from `on_training_run_start` on."
            )
        if self._records is not None:
            self._records.log_figure(name, figure, step)

    def log_histogram(self, name: str, values: Any, step: int | None = None) -> None:
        """Deprecated: logs nothing. It goes with version 2.0."""
        message = "`TrackerCallback.log_histogram` logs nothing any more: give `log_figure` a figure of the histogram."
        warnings.warn(message, FutureWarning, stacklevel=2)

    def on_training_run_start(self, trainer: Trainer, **kwargs: Any) -> None:
        """Open the records and log the hyper-parameters."""
        self._first_step = 0
        self._open(trainer, continues=self._was_restored or trainer.run_history.updates_done > 0)

    def on_step_records(self, trainer: Trainer, **kwargs: Any) -> None:
        """Log what was measured within the epoch."""
        self._log(trainer, is_urgent=False)

    def on_train_epoch_end(self, trainer: Trainer, **kwargs: Any) -> None:
        """Log what was recorded since the last time."""
        self._log(trainer)

    on_eval_epoch_end = on_training_run_epoch_end = on_train_epoch_end

    def on_training_run_end(self, trainer: Trainer, **kwargs: Any) -> None:
        """Log the rest, close the records and print where they are."""
        self._close(trainer, "killed" if trainer.run_context.stopping.signals.number else "finished")

    def on_evaluation_run_start(self, trainer: Trainer, **kwargs: Any) -> None:
        """Open the records of the last training run again, or new ones."""
        self._first_step = self._last_step
        self._open(trainer, continues=self._run_name is not None)

    def on_evaluation_run_end(self, trainer: Trainer, **kwargs: Any) -> None:
        """Log the evaluation, at the last update that was logged, and close the records."""
        self._close(trainer, "finished")

    def on_exception(self, trainer: Trainer, exception: BaseException, **kwargs: Any) -> None:
        """Log what was recorded before the exception, and close the records."""
        is_from_outside = isinstance(exception, (KeyboardInterrupt, SystemExit))
        self._close(trainer, "killed" if is_from_outside else "failed")

    def state_dict(self) -> dict[str, Any]:
        """The name of the run, and what finds its records again. All values that were read are written before."""
        if self._records is not None:
            self._records.write()
        return {"run_name": self._run_name, "identities": dict(self._identities)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue the records of the run that is being resumed."""
        require_kinds(state, {"run_name": (str, type(None)), "identities": (dict,)}, of=type(self).__name__)
        self._run_name, self._identities = state["run_name"], state["identities"]
        self._was_restored = True

    def _open(self, trainer: Trainer, *, continues: bool) -> None:
        """Open the records. Must be called by all ranks."""
        ranks = trainer.run_context.ranks
        if not continues:
            self._run_name, self._identities, self._last_step = None, {}, 0
        self._run_name = self._run_name or self.run_name or new_run_name()
        self._start_trackers(trainer)
        identities = {} if self._records is None else self._records.identities
        self._identities = ranks.from_first({**self._identities, **identities})

    def _start_trackers(self, trainer: Trainer) -> None:
        ranks, history = trainer.run_context.ranks, trainer.run_history
        repeats_from, rows = None, []
        if self._was_restored:
            self._was_restored = False
            repeats_from = self._first_step_to_repeat(history)
            rows = _rows(history.records, history.step_records)
        if not ranks.is_first:
            return
        parts = trainer.model, trainer.optimizer, trainer.scheduler
        values = hyperparameters_of(*parts, run_config=trainer.run_config, own=self.hyperparameters)
        self._records = OpenRecords(lambda text: warn_user(ranks, text), lambda: history.updates_done)
        for tracker in self._trackers:
            place = Place(self.folder, self.project, str(self._run_name), self._options.get(tracker.name, {}))
            self._records.start(tracker, place, self._identities.get(tracker.name), repeats_from, values, rows)

    def _first_step_to_repeat(self, history: RunHistory) -> int:
        """The step from which on the trackers may have values that the run, resumed from a state, will log again.

        Before it, the state has everything, and the trackers had it when the state was saved. It may lie before the
        state's own update, because losses are read in bulk.
        """
        unread = history.read_new_records(self.state_key)
        num_unread_steps = len(history.read_new_step_records(self.state_key))
        read_steps = history.step_records[: len(history.step_records) - num_unread_steps]
        after_last_read = read_steps[-1].update + 1 if read_steps else 0
        return min([history.updates_done, after_last_read, *(record.update for record in unread)])

    def _log(self, trainer: Trainer, *, is_urgent: bool = True) -> None:
        if self._was_restored and self._records is not None:  # the run went back to a state
            self._records.finish("finished")
            self._start_trackers(trainer)
        history = trainer.run_history
        rows = _rows(history.read_new_records(self.state_key), history.read_new_step_records(self.state_key))
        if self._records is not None:
            rows = [Row(max(row.step, self._first_step), row.values) for row in rows]
            self._last_step = max([self._last_step, *(row.step for row in rows)])
            self._records.add(rows, is_urgent=is_urgent)

    def _close(self, trainer: Trainer, outcome: Outcome) -> None:
        self._log(trainer)
        if self._records is not None:
            locations = self._records.finish(outcome)
            self._records = None
            for location in locations:
                trainer.run_context.print(folded(f"Logged to {location}"))


def _rows(records: Iterable[MetricRecord], step_records: Iterable[StepRecord]) -> list[Row]:
    """The numbers of the records, one row for each step unless a name has several values there, in order of steps."""
    rows: list[Row] = []
    values = [(record.update, {record.name: record.value}) for record in records if record.is_scalar]
    for step, new in sorted([*((one.update, _values_of(one)) for one in step_records), *values], key=itemgetter(0)):
        if rows and rows[-1].step == step and not rows[-1].values.keys() & new:
            rows[-1].values.update(new)
        else:
            rows.append(Row(step, new))
    return rows


def _values_of(record: StepRecord) -> dict[str, float]:
    """What was measured, by the names for trackers."""
    values = {name: value for name, value in record.columns().items() if name not in _PLACES}
    return {_NAMES.get(name, f"train/{name}"): value for name, value in values.items()}
