"""Records of a run in other tools: TensorBoard, MLflow, Weights & Biases, and others that accelerate has trackers for.

Nothing here knows a trainer. Everything happens on one process; errors of the tools are raised.
"""

from __future__ import annotations

import difflib
import importlib.util
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import accelerate.tracking
import numpy as np
import torch
from accelerate.tracking import GeneralTracker

from pytorch_accelerated.errors import ArgumentTypeError, ConfigurationError, MissingDependencyError
from pytorch_accelerated.optional import require

_NEEDS_TENSORBOARD = "The tracker 'tensorboard'"
Outcome = Literal["finished", "failed", "killed"]
"""How a run has ended; "killed" by Ctrl-C or another signal."""


class Row(NamedTuple):
    """Values to log at one step."""

    step: int
    values: dict[str, float]


@dataclass(frozen=True)
class Place:
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

    Args:
        name: the tracker's name.
        given: a tracker that the user has made. Without it, `start` makes one.

    Attributes:
        name: the tracker's name.
        is_given: whether it is the user's own.
        identity: what finds the record again, for example the id of a run; None if this kind of tracker has nothing.
    """

    name: str
    is_given: bool
    identity: str | None = None

    def __init__(self, name: str, given: GeneralTracker | None = None) -> None:
        self.name = name
        self.is_given = given is not None
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
            self._general = self._class_of_accelerate(**{**self._arguments(place), **place.options})
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

    def log_histogram(self, name: str, values: np.ndarray[Any, Any], step: int) -> bool:
        """Log the distribution of finite numbers, and return True; return False if there are no histograms."""
        return False

    @property
    def location(self) -> str:
        """The link or the folder of the record; empty if this kind of tracker has nothing to say."""
        return ""

    def finish(self, outcome: Outcome) -> None:
        """Write what is left and close the record."""
        self._general.finish()

    @property
    def _class_of_accelerate(self) -> type[Any]:
        kind: type[Any] = getattr(accelerate.tracking, _KINDS[self.name].class_name)
        return kind

    def _arguments(self, place: Place) -> dict[str, Any]:
        """The keyword arguments of accelerate's class."""
        takes_folder = self._class_of_accelerate.requires_logging_directory
        return {"run_name": place.run_name, **({"logging_dir": str(place.folder)} if takes_folder else {})}


class _TensorBoard(Tracker):
    """Event files in a folder of the run's name. Those that a resumed run writes again are hidden by their step."""

    def log(self, rows: Iterable[Row]) -> None:
        # One event for a step takes a quarter of the time of accelerate's one for each value.
        protocol: Any = require(
            "tensorboard.compat.proto.summary_pb2", extra="tensorboard", needed_by=_NEEDS_TENSORBOARD
        )
        for step, values in rows:
            summary = protocol.Summary()
            for name, value in values.items():
                summary.value.add(tag=name, simple_value=value)
            self._general.tracker.file_writer.add_summary(summary, step)
        self._general.tracker.flush()

    def log_figure(self, name: str, figure: Any, step: int) -> bool:
        self._general.tracker.add_figure(name, figure, step, close=False)
        return True

    def log_histogram(self, name: str, values: np.ndarray[Any, Any], step: int) -> bool:
        self._general.tracker.add_histogram(name, values, step)
        return True

    @property
    def location(self) -> str:
        return str(self._general.tracker.log_dir)

    def _arguments(self, place: Place) -> dict[str, Any]:
        self.identity = self.identity or _unused_name(place.folder, place.run_name)
        purging = {} if self._repeats_from is None else {"purge_step": self._repeats_from}
        # Events are flushed together, so a short queue would only make the two threads wait for each other.
        return {"run_name": self.identity, "logging_dir": str(place.folder), "max_queue": 1000, **purging}


class _MLflow(Tracker):
    """A run in the store that MLflow is set to. The values that it has already are not logged again."""

    def start(self, place: Place, identity: str | None = None, repeats_from: int | None = None) -> None:
        super().start(place, identity, repeats_from)
        self.identity = self._general.tracker.info.run_id
        self._first_new_steps: dict[str, int] = {}

    def log(self, rows: Iterable[Row]) -> None:
        mlflow, now = _mlflow(), int(time.time() * 1000)
        metrics = [
            mlflow.entities.Metric(name, value, now, step)
            for step, values in rows
            for name, value in values.items()
            if step >= self._first_new_step(name)
        ]
        for start in range(0, len(metrics), _MLFLOW_BATCH):
            mlflow.MlflowClient().log_batch(self.identity, metrics=metrics[start : start + _MLFLOW_BATCH])

    def log_figure(self, name: str, figure: Any, step: int) -> bool:
        _mlflow().MlflowClient().log_figure(self.identity, figure, f"{name}/{step}.png")
        return True

    @property
    def location(self) -> str:
        uri, info = _mlflow().get_tracking_uri(), self._general.tracker.info
        if uri.startswith("http"):
            return f"{uri}/#/experiments/{info.experiment_id}/runs/{info.run_id}"
        return f"run {info.run_id} in {uri}"

    def finish(self, outcome: Outcome) -> None:
        _mlflow().end_run(outcome.upper())

    def _arguments(self, place: Place) -> dict[str, Any]:
        # A run that the user has opened becomes the parent of this one.
        is_nested = _mlflow().active_run() is not None
        return {
            "experiment_name": place.project,
            "run_name": place.run_name,
            "run_id": self.identity,
            "nested_run": is_nested,
        }

    def _first_new_step(self, name: str) -> int:
        """The first step of which a continued record has no value of this name."""
        if self._repeats_from is None:
            return 0
        if name not in self._first_new_steps:
            history = _mlflow().MlflowClient().get_metric_history(self.identity, name)
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
        self._general.log({name: _wandb().Image(figure)}, step=step)
        return True

    def log_histogram(self, name: str, values: np.ndarray[Any, Any], step: int) -> bool:
        self._general.log({name: _wandb().Histogram(np_histogram=np.histogram(values, bins=64))}, step=step)
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
        return {
            "run_name": place.project,  # accelerate's name for the project
            "name": place.run_name,
            "id": self.identity,
            "resume": "allow",
            "dir": str(place.folder),
        }


class _Kind(NamedTuple):
    """A kind of tracker.

    Attributes:
        class_name: of accelerate's class.
        tracker: our class.
        package: imports the package, if an extra of this library installs it.
    """

    class_name: str
    tracker: type[Tracker] = Tracker
    package: Callable[[], Any] | None = None


def _tensorboard() -> Any:
    return require("tensorboard", extra="tensorboard", needed_by=_NEEDS_TENSORBOARD)


def _mlflow() -> Any:
    return require("mlflow", extra="mlflow", needed_by="The tracker 'mlflow'")


def _wandb() -> Any:
    return require("wandb", extra="wandb", needed_by="The tracker 'wandb'")


_KINDS = {
    "tensorboard": _Kind("TensorBoardTracker", _TensorBoard, _tensorboard),
    "mlflow": _Kind("MLflowTracker", _MLflow, _mlflow),
    "wandb": _Kind("WandBTracker", _WandB, _wandb),
    "comet_ml": _Kind("CometMLTracker"),
    "aim": _Kind("AimTracker"),
    "clearml": _Kind("ClearMLTracker"),
    "dvclive": _Kind("DVCLiveTracker"),
    "swanlab": _Kind("SwanLabTracker"),
    "trackio": _Kind("TrackioTracker"),
}
TRACKER_NAMES = tuple(_KINDS)
_MLFLOW_BATCH = 1000  # MLflow takes no more in one request


def make_trackers(trackers: str | GeneralTracker | Sequence[str | GeneralTracker]) -> list[Tracker]:
    """The trackers of these names, and those for the user's own instances.

    Raises:
        ArgumentTypeError: for anything else than names and instances.
        ConfigurationError: a ValueError, for an unknown name, or a tracker that is named twice.
        MissingDependencyError: if the package of a tracker is not installed.
    """
    given = [trackers] if isinstance(trackers, (str, GeneralTracker)) else list(trackers)
    made = [_make_tracker(one) for one in given]
    names = [tracker.name for tracker in made]
    if not made or len(set(names)) < len(names):
        raise ConfigurationError(
            f"`trackers` is {given!r}, but it must name one tracker or more, each once. Give for example "
            "['tensorboard', 'mlflow']."
        )
    return made


def _make_tracker(given: Any) -> Tracker:
    if isinstance(given, GeneralTracker):
        # Only what accelerate's own classes have is known of an instance.
        kind = _KINDS.get(given.name)
        is_of_accelerate = kind is not None and type(given).__name__ == kind.class_name
        return (kind.tracker if kind is not None and is_of_accelerate else Tracker)(given.name, given)
    if not isinstance(given, str):
        raise ArgumentTypeError(
            f"{given!r} is not a tracker. Give a name ({', '.join(TRACKER_NAMES)}), or an instance of a subclass of "
            "`accelerate.tracking.GeneralTracker`."
        )
    if given not in _KINDS:
        close = difflib.get_close_matches(given, _KINDS, n=1)
        hint = f"Did you mean {close[0]!r}? " if close else ""
        raise ConfigurationError(
            f"There is no tracker called {given!r}. {hint}There are {', '.join(TRACKER_NAMES)}; for another one, give "
            "an instance of your own subclass of `accelerate.tracking.GeneralTracker`."
        )
    kind = _KINDS[given]
    if kind.package is not None:
        kind.package()
    elif importlib.util.find_spec(given) is None:
        raise MissingDependencyError(
            f"The tracker {given!r} needs the package {given!r}, which is not installed. Install it with: pip install "
            f"{given}"
        )
    return kind.tracker(given)


def new_run_name() -> str:
    """A name that no other run has: the time, and something random."""
    return f"{time.strftime('%Y-%m-%d_%H-%M-%S')}_{uuid.uuid4().hex[:4]}"


def finite_values(values: Any) -> np.ndarray[Any, Any]:
    """The finite numbers of a tensor or an array, as one row on the host."""
    array = values.detach().double().cpu().numpy() if isinstance(values, torch.Tensor) else np.asarray(values, float)
    finite: np.ndarray[Any, Any] = array[np.isfinite(array)]
    return finite


def _unused_name(folder: Path, name: str) -> str:
    """`name`, with a number if an earlier run has a folder of that name: a record holds one run."""
    unused, number = name, 1
    while (folder / unused).exists():
        number += 1
        unused = f"{name}_{number}"
    return unused
