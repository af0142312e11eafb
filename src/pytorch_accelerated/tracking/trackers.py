"""Records of a run in other tools: TensorBoard, MLflow, Weights & Biases, and others that accelerate has trackers for.

Nothing here knows a trainer. Everything happens on one process. A tracker may fail without harm to the run.
"""

from __future__ import annotations

import contextlib
import importlib.util
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker
from torch import nn

from pytorch_accelerated.errors import ConfigurationError, MissingDependencyError
from pytorch_accelerated.models.wrappers import bare_model
from pytorch_accelerated.optional import require
from pytorch_accelerated.run_config import TrainerRunConfig, plain_value

_SECONDS_BETWEEN_WRITES = 1.0  # a store in a database or behind a network takes milliseconds for each request
_MLFLOW_BATCH = 1000  # MLflow takes no more in one request
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
        """The first step of which a continued record has no value of this name."""
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


#: The trackers by name, which is that of their package.
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
            f"`trackers` is {given!r}, but it must name one tracker or more, each once. There are "
            f"{', '.join(TRACKERS)}; for another one, give an instance of your own subclass of "
            "`accelerate.tracking.GeneralTracker`."
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


def hyperparameters_of(
    model: nn.Module,
    optimizer: Any = None,
    scheduler: Any = None,
    *,
    run_config: TrainerRunConfig | None = None,
    own: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """What trackers log of a run: its config, the classes of its parts with their numbers, and values of your own.

    Values are None, bools, numbers and strings. Names of nested values are joined by dots; lists become strings. Does
    not wait for the device.

    >>> hyperparameters_of(nn.Linear(3, 1), own={"data": {"size": 8}})["data.size"]
    8

    Args:
        model: wrapped or not.
        optimizer: any object; of its parameter groups, everything but the parameters is included.
        scheduler: any object.
        run_config: of the run.
        own: values by name; they replace others of the same name.
    """
    bare = bare_model(model)
    total = _elements(bare.parameters())
    trainable = _elements(parameter for parameter in bare.parameters() if parameter.requires_grad)
    nested = {
        **({} if run_config is None else run_config.to_dict()),
        "model": type(bare),
        "model.parameters": total,
        "model.trainable_parameters": trainable,
        "model.trainable_share": trainable / total if total else 0.0,
        # accelerate's wrappers name their own class
        "optimizer": getattr(optimizer, "optimizer", optimizer),
        "scheduler": getattr(scheduler, "scheduler", scheduler),
    }
    for index, group in enumerate(getattr(optimizer, "param_groups", None) or []):
        prefix = f"optimizer.group_{index}" if index else "optimizer"
        settings = {name: value for name, value in group.items() if name != "params"}
        values = {"parameters": _elements(group["params"]), **settings}
        nested |= {f"{prefix}.{name}": value for name, value in values.items()}
    return dict(_flat({**nested, **(own or {})}))


def _elements(parameters: Iterable[torch.Tensor]) -> int:
    return sum(parameter.numel() for parameter in parameters)


def _flat(values: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
            continue
        if isinstance(value, torch.Tensor) and value.numel() == 1:
            value = value.item()  # a learning rate may be a tensor; this is before the first update
        plain = plain_value(value)
        yield f"{prefix}{name}", str(plain) if isinstance(plain, list) else plain


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
            rows: of a resumed run, all of its state. A new record gets them; others those from `repeats_from` on.
        """
        self._open.append(tracker)

        def start() -> None:
            tracker.start(place, identity, repeats_from)
            if identity is None:
                tracker.log_hyperparameters(hyperparameters)
            lacks_all = identity is None and not tracker.is_given
            tracker.log([row for row in rows if lacks_all or row.step >= (repeats_from or 0)])

        self._attempt(tracker, "starting", start)

    def add(self, rows: Iterable[Row], *, is_urgent: bool = True) -> None:
        """Log rows: at once, or if they are not urgent, those of about a second together."""
        self._waiting += rows
        if is_urgent or time.monotonic() - self._last_write > _SECONDS_BETWEEN_WRITES:
            self.write()

    def write(self) -> None:
        """Log the rows that wait."""
        rows, self._waiting = self._waiting, []
        self._last_write = time.monotonic()
        for tracker in list(self._open) if rows else []:
            self._attempt(tracker, "logging", partial(tracker.log, rows))

    def log_figure(self, name: str, figure: Any, step: int | None) -> None:
        """Log a figure to the trackers that take figures, and warn of the others.

        Args:
            name: of the figure.
            figure: of matplotlib.
            step: the number of updates; None for those so far.
        """
        at = self._updates_done() if step is None else step
        self.write()  # W&B refuses steps before the last one

        def log(tracker: Tracker) -> None:
            if not tracker.log_figure(name, figure, at):
                self._warn(f"The tracker {tracker.name!r} takes no figures, so they are not logged there.")

        for tracker in list(self._open):
            self._attempt(tracker, "logging figures", partial(log, tracker))

    def finish(self, outcome: Outcome) -> list[str]:
        """Log what waits, and close all records. Returns where they are, a text for each tracker."""
        self.write()
        locations = []
        for tracker in list(self._open):
            with contextlib.suppress(Exception):  # the record is more important than where it is
                locations.append(f"{tracker.name}: {tracker.location}" if tracker.location else tracker.name)
            self._attempt(tracker, "closing", partial(tracker.finish, outcome))
        self._open = []
        return locations

    def _attempt(self, tracker: Tracker, what: str, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:
            self._open.remove(tracker)
            if what != "closing":
                with contextlib.suppress(Exception):  # it may not have started
                    tracker.finish("failed")
            self._warn(
                f"The tracker {tracker.name!r} failed at {what}, after {self._updates_done()} updates "
                f"({type(error).__name__}: {error}). The run continues without it."
            )
