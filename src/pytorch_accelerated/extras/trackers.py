"""Records of a run in TensorBoard, MLflow, Weights & Biases and other trackers, and the callback that logs to them.

A tracker may fail without harm to the run. For another one, write a subclass of `Tracker`, and name it in `TRACKERS`.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import time
import uuid
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from accelerate.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker

from pytorch_accelerated.callbacks import TrainerCallback
from pytorch_accelerated.errors import ConfigurationError, MissingDependencyError, require_kinds
from pytorch_accelerated.facts import require
from pytorch_accelerated.record import joined, warn_user
from pytorch_accelerated.record.text import folded
from pytorch_accelerated.tracking import MetricRecord, RunHistory, StepRecord, hyperparameters_of

if TYPE_CHECKING:
    from pytorch_accelerated.loop.callback import Trainer

_PLACES = ("epoch", "update", "samples", "seconds")  # of a step record
_NAMES = {"train_loss": "train/loss", "peak_memory": "train/peak_memory_bytes"}
_SECONDS_BETWEEN_WRITES = 1.0  # a store in a database or behind a network takes milliseconds for each request
_MLFLOW_BATCH = 1000  # MLflow takes no more in one request
Outcome = Literal["finished", "failed", "killed"]
"""How a run has ended; "killed" by Ctrl-C or another signal."""


class Row(NamedTuple):
    """Values to log at one step."""

    step: int
    values: dict[str, float]


class Place(NamedTuple):
    """Where the records of a run go.

    Attributes:
        folder: for all files.
        project: MLflow's experiment, W&B's project.
        run_name: the name of the run.
        options: keyword arguments of accelerate's tracker class.
    """

    folder: Path
    project: str
    run_name: str
    options: Mapping[str, Any]


class Tracker:
    """One of accelerate's trackers, or a user's own one, with what accelerate leaves open: resuming, figures, links.

    For a tracker that accelerate does not have, write a subclass with `start`, `log_hyperparameters`, `log` and
    `finish`, and name it in `TRACKERS`.

    Args:
        name: the tracker's name.
        given: a tracker that the user has made. Without it, `start` makes one.

    Attributes:
        name: the tracker's name.
        is_given: whether it is the user's own.
        identity: what finds the record again, for example the id of a run; None if this kind of tracker has nothing.
    """

    def __init__(self, name: str, given: GeneralTracker | None = None) -> None:
        self.name = name
        self.is_given = given is not None
        self.identity: str | None = None
        self._general: Any = given

    def start(self, place: Place, identity: str | None = None, repeats_from: int | None = None) -> None:
        """Open a record.

        Args:
            place: where.
            identity: of a record to continue; None for a new one.
            repeats_from: the step from which on all values of a continued record will be logged again, because the run
                was resumed from a state of that step; None if they will not.
        """
        self.identity = identity
        self._repeats_from = repeats_from
        if not self.is_given:
            self._general = LOGGER_TYPE_TO_CLASS[self.name](**{**self._arguments(place), **place.options})
        self._general.start()

    def log_hyperparameters(self, values: dict[str, Any]) -> None:
        """Log plain values, by name."""
        self._general.store_init_configuration(values)

    def log(self, rows: Iterable[Row]) -> None:
        """Log rows, in the order of their steps, except for values that the record is known to have already."""
        for row in rows:
            self._general.log(row.values, step=row.step)

    def log_figure(self, name: str, figure: Any, step: int) -> bool:
        """Log a matplotlib figure, and return True; return False if this kind of tracker has no figures."""
        return False

    @property
    def location(self) -> str:
        """The link or the folder of the record; empty if this kind of tracker has nothing to say."""
        return ""

    def finish(self, outcome: Outcome) -> None:
        """Write what is left and close the record."""
        self._general.finish()

    def _arguments(self, place: Place) -> dict[str, Any]:
        """The keyword arguments of accelerate's class."""
        takes_folder = LOGGER_TYPE_TO_CLASS[self.name].requires_logging_directory
        return {"run_name": place.run_name, **({"logging_dir": str(place.folder)} if takes_folder else {})}


class _TensorBoard(Tracker):
    """Event files in a folder of the run's name. Those that a resumed run writes again are hidden by their step."""

    def log(self, rows: Iterable[Row]) -> None:
        writer = self._general.tracker
        for step, values in rows:
            for name, value in values.items():
                writer.add_scalar(name, value, step)
        writer.flush()  # once: accelerate's method waits for the thread that writes after each row

    def log_figure(self, name: str, figure: Any, step: int) -> bool:
        self._general.tracker.add_figure(name, figure, step, close=False)
        return True

    @property
    def location(self) -> str:
        return str(self._general.tracker.log_dir)

    def _arguments(self, place: Place) -> dict[str, Any]:
        number, name = 1, place.run_name
        while self.identity is None and (place.folder / name).exists():  # a record holds one run
            number += 1
            name = f"{place.run_name}_{number}"
        self.identity = self.identity or name
        purging = {} if self._repeats_from is None else {"purge_step": self._repeats_from}
        # The two threads would wait for each other with a short queue.
        return {"run_name": self.identity, "logging_dir": str(place.folder), "max_queue": 1000, **purging}


class _MLflow(Tracker):
    """A run in the store that MLflow is set to. The values that it has already are not logged again."""

    @property
    def _api(self) -> Any:
        return require("mlflow", needed_by="The tracker 'mlflow'")

    def start(self, place: Place, identity: str | None = None, repeats_from: int | None = None) -> None:
        super().start(place, identity, repeats_from)
        self.identity = self._general.tracker.info.run_id
        self._first_new_steps: dict[str, int] = {}

    def log(self, rows: Iterable[Row]) -> None:
        now = int(time.time() * 1000)
        metrics = [
            self._api.entities.Metric(name, value, now, step)
            for step, values in rows
            for name, value in values.items()
            if step >= self._first_new_step(name)
        ]
        for start in range(0, len(metrics), _MLFLOW_BATCH):
            self._api.MlflowClient().log_batch(self.identity, metrics=metrics[start : start + _MLFLOW_BATCH])

    def log_figure(self, name: str, figure: Any, step: int) -> bool:
        self._general.log_figure(figure, f"{name}/{step}.png")
        return True

    @property
    def location(self) -> str:
        return f"run {self.identity} in {self._api.get_tracking_uri()}"

    def finish(self, outcome: Outcome) -> None:
        self._api.end_run(outcome.upper())

    def _arguments(self, place: Place) -> dict[str, Any]:
        # A run that the user has opened becomes the parent of this one.
        is_nested = self._api.active_run() is not None
        names = {"experiment_name": place.project, "run_name": place.run_name}
        return {**names, "run_id": self.identity, "nested_run": is_nested}

    def _first_new_step(self, name: str) -> int:
        """The first step for which a continued record lacks a value of this name."""
        if self._repeats_from is None:
            return 0
        if name not in self._first_new_steps:
            history = self._api.MlflowClient().get_metric_history(self.identity, name)
            self._first_new_steps[name] = 1 + max((metric.step for metric in history), default=-1)
        return self._first_new_steps[name]


class _WandB(Tracker):
    """A run of Weights & Biases. Rows that its service has already are not logged again."""

    def log(self, rows: Iterable[Row]) -> None:
        first = self._general.tracker.starting_step  # W&B refuses earlier ones
        if self._repeats_from is None:
            rows = [Row(max(row.step, first), row.values) for row in rows]
        super().log(row for row in rows if row.step >= first)

    def log_figure(self, name: str, figure: Any, step: int) -> bool:
        self._general.log({name: require("wandb", needed_by="The tracker 'wandb'").Image(figure)}, step=step)
        return True

    @property
    def location(self) -> str:
        run = self._general.tracker
        return f"{Path(run.dir).parent} (`wandb sync` uploads it)" if run.offline else run.url or run.id

    def finish(self, outcome: Outcome) -> None:
        self._general.tracker.finish(exit_code=0 if outcome == "finished" else 1)

    def _arguments(self, place: Place) -> dict[str, Any]:
        self.identity = self.identity or uuid.uuid4().hex[:12]
        place.folder.mkdir(parents=True, exist_ok=True)  # otherwise W&B takes a temporary folder
        # accelerate's `run_name` is the project
        names = {"run_name": place.project, "name": place.run_name, "id": self.identity}
        return {**names, "resume": "allow", "dir": str(place.folder)}


#: The trackers by the names of their packages.
TRACKERS: dict[str, type[Tracker]] = {
    **dict.fromkeys(LOGGER_TYPE_TO_CLASS, Tracker),
    "tensorboard": _TensorBoard,
    "mlflow": _MLflow,
    "wandb": _WandB,
}


def make_trackers(trackers: str | GeneralTracker | Sequence[str | GeneralTracker]) -> list[Tracker]:
    """The trackers of these names, and those for the user's own instances.

    Raises:
        ConfigurationError: a ValueError, for anything else, or a tracker that is named twice.
        MissingDependencyError: if the package of a tracker is not installed.
    """
    given = [trackers] if isinstance(trackers, (str, GeneralTracker)) else list(trackers)
    names = [one.name if isinstance(one, GeneralTracker) else one for one in given]
    is_known = all(isinstance(one, GeneralTracker) or one in TRACKERS for one in given)
    if not given or not is_known or len(set(names)) < len(names):
        raise ConfigurationError(
            f"`trackers` is {given!r}, but it must name one or more, each once: of {', '.join(TRACKERS)}. For another "
            "one, give an instance of your own subclass of `accelerate.tracking.GeneralTracker`."
        )
    return [_make_tracker(one) for one in given]


def _make_tracker(given: Any) -> Tracker:
    if isinstance(given, GeneralTracker):
        # Only what accelerate's own classes have is known of an instance.
        is_of_accelerate = type(given) is LOGGER_TYPE_TO_CLASS.get(given.name)
        return (TRACKERS[given.name] if is_of_accelerate else Tracker)(given.name, given)
    if importlib.util.find_spec(given) is None:
        raise MissingDependencyError(
            f"The tracker {given!r} needs the package {given!r}, which is not installed. Install it with: pip install "
            f"{given}"
        )
    return TRACKERS[given](given)


def new_run_name() -> str:
    """A name that no other run has: the time, and something random."""
    return f"{time.strftime('%Y-%m-%d_%H-%M-%S')}_{uuid.uuid4().hex[:4]}"


class OpenRecords:
    """The open records of a run. A tracker that fails is named in one warning, and not used any more.

    Args:
        warn: shows a warning to the user.
        updates_done: the updates so far.
    """

    def __init__(self, warn: Callable[[str], None], updates_done: Callable[[], int]) -> None:
        self._warn = warn
        self._updates_done = updates_done
        self._open: list[Tracker] = []
        self._waiting: list[Row] = []
        self._last_write = time.monotonic()

    @property
    def identities(self) -> dict[str, str]:
        """What finds the records again, by tracker."""
        return {one.name: one.identity for one in self._open if one.identity is not None and not one.is_given}

    def start(
        self,
        tracker: Tracker,
        place: Place,
        identity: str | None,
        repeats_from: int | None,
        hyperparameters: dict[str, Any],
        rows: Sequence[Row] = (),
    ) -> None:
        """Open the record of a tracker; see `Tracker.start`.

        Args:
            tracker, place, identity, repeats_from: as there.
            hyperparameters: for a new record.
            rows: what the run has logged already, as far as it will be logged again.
        """
        self._open.append(tracker)
        with self._going_on_without(tracker, "starting"):
            tracker.start(place, identity, repeats_from)
            if identity is None:
                tracker.log_hyperparameters(hyperparameters)
            tracker.log(rows)

    def add(self, rows: Iterable[Row], *, is_urgent: bool = True) -> None:
        """Log rows: at once, or if they are not urgent, about once a second together."""
        self._waiting += rows
        if is_urgent or time.monotonic() - self._last_write > _SECONDS_BETWEEN_WRITES:
            self.write()

    def write(self) -> None:
        """Log the rows that wait."""
        rows, self._waiting = self._waiting, []
        self._last_write = time.monotonic()
        for tracker in list(self._open) if rows else []:
            with self._going_on_without(tracker, "logging"):
                tracker.log(rows)

    def log_figure(self, name: str, figure: Any, step: int | None) -> None:
        """Log a figure to the trackers that take figures, and warn of the others.

        Args:
            name: of the figure.
            figure: of matplotlib.
            step: the number of updates; None for those so far.
        """
        at = self._updates_done() if step is None else step
        self.write()  # W&B refuses steps before the last one
        for tracker in list(self._open):
            with self._going_on_without(tracker, "logging figures"):
                if not tracker.log_figure(name, figure, at):
                    self._warn(f"The tracker {tracker.name!r} takes no figures, so they are not logged there.")

    def finish(self, outcome: Outcome) -> list[str]:
        """Log what waits, and close all records. Returns where they are, a text for each tracker."""
        self.write()
        locations = []
        for tracker in list(self._open):
            with contextlib.suppress(Exception):  # the record is more important than where it is
                locations.append(f"{tracker.name}: {tracker.location}" if tracker.location else tracker.name)
            with self._going_on_without(tracker, "closing"):
                tracker.finish(outcome)
        self._open = []
        return locations

    @contextlib.contextmanager
    def _going_on_without(self, tracker: Tracker, what: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._open.remove(tracker)
            if what != "closing":
                with contextlib.suppress(Exception):  # it may not have started
                    tracker.finish("failed")
            self._warn(
                f"The tracker {tracker.name!r} failed at {what}, after {self._updates_done()} updates "
                f"({type(error).__name__}: {error}). The run continues without it."
            )


class TrackerCallback(TrainerCallback):
    """Logs a run to one or more trackers: its hyper-parameters, and all numbers of the run history as they come.

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
        hyperparameters: values of your own to log with the run's, by name; nested dicts are joined by dots.
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
        self.folder = self._absolute(folder)
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
            ConfigurationError: a ValueError, outside of a run.
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
        self._close(trainer, "killed" if trainer.run_context.control.stopping.signals.number else "finished")

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
        ranks = trainer.run_context.parts.ranks
        if not continues:
            self._run_name, self._identities, self._last_step = None, {}, 0
        self._run_name = self._run_name or self.run_name or new_run_name()
        self._start_trackers(trainer)
        identities = {} if self._records is None else self._records.identities
        self._identities = ranks.from_first({**self._identities, **identities})

    def _start_trackers(self, trainer: Trainer) -> None:
        ranks, history = trainer.run_context.parts.ranks, trainer.run_history
        repeats_from, rows, unread = None, [], []
        if self._was_restored:
            # Trackers may have more than the state: they get all of it again, but for those that nothing is known of.
            self._was_restored, repeats_from = False, 0
            rows, unread = _rows(history.records, history.step_records), self._unread(history)
        if not ranks.is_first:
            return
        parts = trainer.model, trainer.optimizer, trainer.scheduler
        values = hyperparameters_of(*parts, run_config=trainer.run_config, own=self.hyperparameters)
        self._records = OpenRecords(lambda text: warn_user(ranks, text), lambda: history.updates_done)
        for tracker in self._trackers:
            place = Place(self.folder, self.project, str(self._run_name), self._options.get(tracker.name, {}))
            wanted, identity = unread if tracker.is_given else rows, self._identities.get(tracker.name)
            self._records.start(tracker, place, identity, repeats_from, values, wanted)

    def _unread(self, history: RunHistory) -> list[Row]:
        return _rows(history.read_new_records(self.state_key), history.read_new_step_records(self.state_key))

    def _log(self, trainer: Trainer, *, is_urgent: bool = True) -> None:
        if self._was_restored and self._records is not None:  # the run went back to a state
            self._records.finish("finished")
            self._start_trackers(trainer)
        rows = self._unread(trainer.run_history)
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
    """The numbers of the records, one row for each step unless a name has two values there, in order of steps."""
    values = [(record.update, {record.name: record.value}) for record in records if record.is_scalar]
    measured = [(record.update, _values_of(record)) for record in step_records]
    return [Row(*row) for row in joined(sorted([*measured, *values], key=itemgetter(0)))]


def _values_of(record: StepRecord) -> dict[str, float]:
    """What was measured, by the names for trackers."""
    values = {name: value for name, value in record.columns().items() if name not in _PLACES}
    return {_NAMES.get(name, f"train/{name}"): value for name, value in values.items()}
