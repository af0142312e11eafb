"""The history of a run: every value of every metric, with the epoch and the update that it belongs to."""

from __future__ import annotations

import contextlib
import difflib
import functools
import itertools
import math
import numbers
import os
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING, Any, TypeVar

from pytorch_accelerated.facts.optional import require
from pytorch_accelerated.record.plotting import plot_runs
from pytorch_accelerated.record.step_records import (
    EpochTiming,
    SlowRank,
    StepRecord,
    records_of,
    slow_rank_in,
    table_of,
)
from pytorch_accelerated.record.text import format_number, table_of_rows
from pytorch_accelerated.record.values import (
    MetricRecord,
    columns_of,
    joined,
    name_in_set,
    records_in,
    stored_value,
    unknown_metric,
)

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure


Record = TypeVar("Record", MetricRecord, StepRecord)

# Entries of a log that tell where a run is and how fast, which aren't results.
_PLACES = ("epoch", "step", "total_flos", "num_input_tokens_seen")
_SPEEDS = ("_runtime", "_samples_per_second", "_steps_per_second", "_tokens_per_second")
_STEP = ("grad_norm", "learning_rate")
_UPDATES_OF_SLOW_RANK = 20


class RunHistory(ABC):
    """The metrics of a run. Subclass it to store them elsewhere than `InMemoryRunHistory` does.

    A subclass implements `get_metric_names`, `get_metric_values`, `get_latest_metric`, `update_metric` and `reset`,
    and need not call ``super().__init__()``: `records` and `step_records`, on which loggers and training states rely,
    are kept here.

    Attributes:
        is_evaluated_beside: whether values of evaluations come later than the epochs to which they belong, because
            another process evaluates the training states of the run.
        names_not_saved: metrics for which a warning has said that training states leave out some of their values.
        names_not_shown: metrics that were recorded with ``shown=False``.
        names_measured_afterwards: metrics that `Trainer.measure` has added to the history of a finished run.
        updates_done: optimizer updates so far, counted by the loop. If the history is not reset, a second run continues
            the count of the first.
        metric_name_prefix: the prefix of the names of recorded metrics; see `set_metric_name_prefix`.
        evaluation_set: the name of the evaluation set that is being evaluated; empty if it has none.
    """

    is_evaluated_beside = False
    metric_name_prefix = evaluation_set = ""

    # Subclasses in existing scripts don't call `super().__init__()`, so the records are made here.
    def __new__(cls, *args: Any, **kwargs: Any) -> RunHistory:
        history = super().__new__(cls)
        history._start_over()
        return history

    def _start_over(self) -> None:
        self._current_epoch = 1
        self.updates_done = 0
        self._metric_records: list[MetricRecord] = []
        # The loop asks for latest and best values after each epoch; searching all records would take ever longer.
        self._extremes: dict[str, dict[str, MetricRecord]] = {}
        self._step_records: list[StepRecord] = []
        self._step_read_positions: dict[str, int] = {}
        self._timings: list[EpochTiming] = []
        self._read_positions: dict[str, int] = {}
        self.names_not_saved: set[str] = set()
        self.names_not_shown: set[str] = set()
        self.names_measured_afterwards: set[str] = set()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        # Subclasses override these methods without `super()`. Loggers and states need the records all the same.
        if "update_metric" in vars(cls):
            cls.update_metric = _recorded(cls.update_metric)  # type: ignore[method-assign]
        if "reset" in vars(cls):
            cls.reset = _starting_over(cls.reset)  # type: ignore[method-assign]

    @abstractmethod
    def get_metric_names(self) -> Collection[str]:
        """The names of all metrics that have values."""

    @abstractmethod
    def get_metric_values(self, name: str) -> Sequence[Any]:
        """All values of a metric in the order of recording; none for an unknown name."""

    @abstractmethod
    def get_latest_metric(self, name: str) -> Any:
        """The last value of a metric.

        Raises:
            UnknownMetricError: a ValueError, if it has no value.
        """

    @abstractmethod
    def update_metric(self, name: str, value: Any, *, shown: bool = True) -> None:
        """Record a value under the name `metric_name_prefix` + `name`, for the current epoch and update.

        Args:
            name: of the metric, without prefix.
            value: anything. A number, a numpy scalar, or a 0-dim array or tensor (which waits for its device) is
                recorded as a float. Other values, such as a confusion matrix or a dict, are kept as they are, with
                tensors and arrays copied to the host; tables, plots, logs and watching callbacks ignore them. The
                method of a subclass receives the value to record.
            shown: False to leave the metric out of the table of epochs, and of plots and reports that aren't asked for
                it by name. Files and trackers have it. The method of a subclass does not receive it.
        """

    @abstractmethod
    def reset(self) -> None:
        """Forget all values and go back to epoch 1 and update 0. The prefix stays."""

    def set_metric_name_prefix(self, prefix: str = "") -> None:
        """Put `prefix` before the name of each metric recorded from now on."""
        self.metric_name_prefix = prefix

    @contextlib.contextmanager
    def measuring_on(self, evaluation_set: str) -> Iterator[None]:
        """In the block, the names of recorded metrics contain a set's: "eval_noisy_loss_epoch"."""
        before, self.evaluation_set = self.evaluation_set, evaluation_set
        try:
            yield
        finally:
            self.evaluation_set = before

    @property
    def current_epoch(self) -> int:
        """The current epoch, counted from 1."""
        return self._current_epoch

    def _increment_epoch(self) -> None:
        self._current_epoch += 1

    def _set_epoch(self, epoch: int) -> None:
        self._current_epoch = epoch

    @contextlib.contextmanager
    def measuring_at(self, epoch: int, update: int) -> Iterator[None]:
        """In the block, values are recorded for an earlier epoch and update."""
        before = self._current_epoch, self.updates_done
        self._current_epoch, self.updates_done = epoch, update
        try:
            yield
        finally:
            self._current_epoch, self.updates_done = before

    @property
    def records(self) -> Sequence[MetricRecord]:
        """Every value of every metric, in the order of recording."""
        return tuple(self._metric_records)

    def latest_record(self, name: str) -> MetricRecord | None:
        """The last value of a metric, with its place; None without any."""
        return self._extremes.get(name, {}).get("latest")

    def best_record(self, name: str, greater_is_better: bool) -> MetricRecord | None:
        """The first of the best finite values of a metric, with its place; None without any."""
        return self._extremes.get(name, {}).get("greatest" if greater_is_better else "least")

    def read_new_records(self, reader: str) -> list[MetricRecord]:
        """The values recorded since the last call with this `reader`.

        The history remembers the position of each reader, and saves it with its state, so each reader gets every value
        once, independently of the others.

        Args:
            reader: any name, for example the `state_key` of a callback.
        """
        return _new_for(reader, self._metric_records, self._read_positions)

    @property
    def step_records(self) -> Sequence[StepRecord]:
        """What was measured within the training epochs, in the order of updates.

        They are added when losses are read: after each 64 updates of an epoch, at its end, and before an evaluation or
        a save within it. `Trainer.train` says how many there are. The Hugging Face trainer makes none: it logs by
        ``logging_steps``.
        """
        return tuple(self._step_records)

    def add_step_record(self, record: StepRecord) -> None:
        """Record what was measured over some updates. The loop does so."""
        self._step_records.append(record)

    def read_new_step_records(self, reader: str) -> list[StepRecord]:
        """The step records added since the last call with this `reader`; see `RunHistory.read_new_records`.

        Args:
            reader: any name, for example the `state_key` of a callback.
        """
        return _new_for(reader, self._step_records, self._step_read_positions)

    @property
    def slow_rank(self) -> SlowRank | None:
        """The rank for which the others have waited at least 20 % of the time of the last epoch; None if there is none.

        It is the same rank in both halves of the updates of that epoch, so no single delay is taken for one; if there
        were fewer than 20, of the last 20 updates. The step records have the times.
        """
        records = self._step_records
        last = records[-1].update if records else 0
        before = max((record.update for record in records if record.epoch < records[-1].epoch), default=0)
        before = min(before, last - _UPDATES_OF_SLOW_RANK)
        if before < 0:
            return None
        middle = (before + last) // 2
        first = [record for record in records if before < record.update <= middle]
        second = [record for record in records if middle < record.update]
        found = [slow_rank_in(part) for part in (first, second, first + second) if part]
        return found[-1] if len({None if each is None else each.rank for each in found}) == 1 else None

    @property
    def timings(self) -> Sequence[EpochTiming]:
        """How long the training epochs of this process took. They are not part of a saved state."""
        return tuple(self._timings)

    def add_timing(self, timing: EpochTiming) -> None:
        """Record how long an epoch took."""
        self._timings.append(timing)

    def delete_metric(self, name: str) -> None:
        """Forget all values of a metric.

        All other values are recorded again after a reset; a subclass that can do better may override this.

        Raises:
            UnknownMetricError: a ValueError, if it has no value.
        """
        if name not in self.get_metric_names():
            raise unknown_metric(name, self.get_metric_names())
        self.load_state_dict(with_some_records(self.state_dict(), [each.name != name for each in self._metric_records]))

    def state_dict(self) -> dict[str, Any]:
        """The whole history: numbers, including NaN and infinities, in tensors, and the rest as it was recorded."""
        return {
            "records": columns_of(self._metric_records),
            "read_positions": dict(self._read_positions),
            "step_records": table_of(self._step_records),
            "step_read_positions": dict(self._step_read_positions),
            "current_epoch": self._current_epoch,
            "updates_done": self.updates_done,
            "metric_name_prefix": self.metric_name_prefix,
            "names_not_shown": sorted(self.names_not_shown),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the result of `state_dict`: the history is reset, and the values are recorded again."""
        self.reset()
        # A subclass stores values where it likes, so `update_metric` gets each of them again, under its whole name.
        self.set_metric_name_prefix("")
        with self.measuring_on(""):
            for name, value, epoch, update in records_in(state["records"]):
                self._set_epoch(epoch)
                self.updates_done = update
                self.update_metric(name, value)
        self.names_not_shown.update(state.get("names_not_shown", ()))  # older states have none
        self._read_positions.update(state["read_positions"])
        if "step_records" in state:  # older states have none
            self._step_records += records_of(state["step_records"])
            self._step_read_positions.update(state["step_read_positions"])
        self._set_epoch(state["current_epoch"])
        self.updates_done = state["updates_done"]
        self.set_metric_name_prefix(state["metric_name_prefix"])

    def copy(self) -> InMemoryRunHistory:
        """An independent copy in memory."""
        copied = InMemoryRunHistory()
        copied.load_state_dict(self.state_dict())
        copied._timings = list(self._timings)
        return copied

    def to_dataframe(self, *, step_records: bool = False) -> pd.DataFrame:
        """A table with a column for each metric and a row for each moment of recording; NaN where a value is missing.

        Only numbers are included; `get_metric_values` has the other values.

        The index is (epoch, update). A metric with two values at one moment gets two rows.

        Args:
            step_records: instead a table of `step_records`, with a row for each and the columns of
                `StepRecord.columns`. It can be joined with the other one, since both have the same index.

        Raises:
            MissingDependencyError: if pandas is not installed.
        """
        pandas = require("pandas", needed_by="RunHistory.to_dataframe")
        scalars = (record for record in self._metric_records if record.is_scalar)
        rows = joined(((record.epoch, record.update), {record.name: record.value}) for record in scalars)
        if step_records:
            rows = [((record.epoch, record.update), record.columns()) for record in self._step_records]
            for _, values in rows:
                del values["epoch"], values["update"]
        moments = pandas.DataFrame([moment for moment, _ in rows], columns=["epoch", "update"], dtype="int64")
        return pandas.DataFrame([values for _, values in rows], index=pandas.MultiIndex.from_frame(moments))

    def plot(
        self,
        metric_names: str | Iterable[str] | None = None,
        path: str | os.PathLike[str] | None = None,
        *,
        compare: Mapping[str, RunHistory] | None = None,
        smoothing: float = 0.6,
        log_scale: bool = False,
    ) -> Figure:
        """A matplotlib figure of the metrics: one panel for each quantity, with training and evaluation together.

        The loss has its curve within the epochs, from `step_records`, and rings mark the best values. No display is
        needed. A notebook shows the figure if it is the value of a cell's last line.

        Args:
            metric_names: the metric or metrics to plot; by default all.
            path: also save the picture there; the suffix determines the format.
            compare: histories of other runs by name, to be plotted next to this one, which is named "this run".
            smoothing: weight of the past, from 0 to below 1, in the mean that smoothes the curve within epochs; the
                curve as it is stays visible behind it.
            log_scale: whether the axes of losses are logarithmic.

        Raises:
            UnknownMetricError: a ValueError, if one of the metrics has no numbers as values in any of the runs, or
                there are no metrics.
            ConfigurationError: a ValueError, for a smoothing that cannot be.
            MissingDependencyError: if matplotlib is not installed.
        """
        histories = {"this run": self, **(compare or {})}
        return plot_runs(histories, metric_names, path, smoothing=smoothing, log_scale=log_scale)

    def __repr__(self) -> str:
        """The last epoch with any value, and the latest value of each metric."""
        shown = {name: known for name, known in self._extremes.items() if name not in self.names_not_shown}
        values = ", ".join(f"{name} {_text(known['latest'])}" for name, known in shown.items())
        place = f"epoch {self._metric_records[-1].epoch}: {values}" if values else "no metrics"
        return f"{type(self).__name__}({place})"

    def _repr_html_(self) -> str:
        """For notebooks: a table with a row for each moment of recording, of the last 100."""
        scalars = [each for each in self._metric_records if each.is_scalar and each.name not in self.names_not_shown]
        rows = joined(((each.epoch, each.update), {each.name: format_number(each.value)}) for each in scalars)
        return table_of_rows(
            {"epoch": str(epoch), "update": str(update), **row} for (epoch, update), row in rows[-100:]
        )


def with_some_records(state: Mapping[str, Any], keep: Sequence[bool]) -> dict[str, Any]:
    """The state of a history without some of its records.

    Args:
        state: from `RunHistory.state_dict`.
        keep: whether to keep each record.
    """
    return {
        **state,
        "records": columns_of(itertools.compress(records_in(state["records"]), keep)),
        "read_positions": {reader: sum(keep[:end]) for reader, end in state["read_positions"].items()},
    }


def _recorded(update_metric: Callable[..., None]) -> Callable[..., None]:
    """Wraps a subclass's `update_metric`: it receives the value to record, which is also added to the records."""

    @functools.wraps(update_metric)
    def wrapper(self: RunHistory, name: str, value: Any, *args: Any, shown: bool = True, **kwargs: Any) -> None:
        value, records_before = stored_value(value), len(self._metric_records)
        evaluation_set, self.evaluation_set = self.evaluation_set, ""
        if evaluation_set:
            name = name_in_set(name, evaluation_set)
        try:
            # A method that calls its base class's gives it the whole name, so the set is left out meanwhile.
            update_metric(self, name, value, *args, **kwargs)
        finally:
            self.evaluation_set = evaluation_set
        if len(self._metric_records) == records_before:  # otherwise the method of the base class has recorded the value
            record = MetricRecord(self.metric_name_prefix + name, value, self.current_epoch, self.updates_done)
            self._metric_records.append(record)
            _compare(self._extremes.setdefault(record.name, {}), record)
        if not shown:
            self.names_not_shown.update(each.name for each in self._metric_records[records_before:])

    return wrapper


def _new_for(reader: str, records: list[Record], positions: dict[str, int]) -> list[Record]:
    """The records that a reader has not had yet."""
    # Positions, not the records themselves, are saved: a resumed run prints and logs no value a second time.
    start = positions.get(reader, 0)
    positions[reader] = len(records)
    return records[start:]


def _compare(known: dict[str, MetricRecord], record: MetricRecord) -> None:
    known["latest"] = record
    if record.is_scalar and math.isfinite(record.value):
        if "least" not in known or record.value < known["least"].value:
            known["least"] = record
        if "greatest" not in known or record.value > known["greatest"].value:
            known["greatest"] = record


def _starting_over(reset: Callable[..., None]) -> Callable[..., None]:
    """Wraps a subclass's `reset`: it also clears the records."""

    @functools.wraps(reset)
    def wrapper(self: RunHistory, *args: Any, **kwargs: Any) -> None:
        reset(self, *args, **kwargs)
        self._start_over()

    return wrapper


def _text(record: MetricRecord) -> str:
    return f"{record.value:.4g}" if record.is_scalar else f"({type(record.value).__name__})"


class InMemoryRunHistory(RunHistory):
    """A run history in memory, lost at the end of the process unless it is saved with a training state."""

    def __init__(self) -> None:
        self._metrics: dict[str, list[Any]] = {}

    def get_metric_names(self) -> AbstractSet[str]:
        """The names of all metrics that have values: a set, in the order in which they were first recorded."""
        return dict.fromkeys(self._metrics).keys()

    def get_metric_values(self, name: str) -> list[Any]:
        near = [] if name in self._metrics else difflib.get_close_matches(name, self._metrics, n=1, cutoff=0.9)
        if near:
            warnings.warn(f"No metric {name!r} was recorded, so it has no values. Meant {near[0]!r}?", stacklevel=2)
        return list(self._metrics.get(name, ()))

    def get_latest_metric(self, name: str) -> Any:
        if name not in self._metrics:
            raise unknown_metric(name, self._metrics)
        return self._metrics[name][-1]

    def update_metric(self, name: str, value: Any, *, shown: bool = True) -> None:
        self._metrics.setdefault(self.metric_name_prefix + name, []).append(value)

    def reset(self) -> None:
        self._metrics = {}


class LoggedHistory(InMemoryRunHistory):
    """The results in a log history as a run history, which can plot them, compare them and make a data frame of them.

    ::

        history = LoggedHistory(trainer.state.log_history)
        history.plot()
        history.plot(compare={"other": LoggedHistory(TrainerState.load_from_json(path).log_history)})

    Metrics have the names that they were logged with: ``loss`` is the loss of training. Their epochs are counted from
    1, and updates are steps. Learning rates, gradient norms, speeds and the summary at the end of a training are left
    out.

    Args:
        log_history: entries with ``epoch`` and ``step``, oldest first, also of transformers' Trainer.
    """

    def __init__(self, log_history: Iterable[Mapping[str, Any]] = ()) -> None:
        super().__init__()
        for entry in log_history:
            if not is_summary(entry):
                self.add(entry, entry.get("epoch", 0), entry.get("step", 0))

    def add(self, logs: Mapping[str, Any], epoch: float, step: int) -> None:
        """Record the results in an entry of the log history.

        Args:
            logs: the entry.
            epoch: passes over the training set so far, with the fraction of the current one.
            step: updates so far.
        """
        # A fraction such as 0.9999999 is a whole epoch; what is logged before the first update belongs to epoch 1.
        whole = round(epoch)
        is_whole = math.isclose(epoch, whole, abs_tol=1e-6)
        self._set_epoch(max(1, whole if is_whole else math.ceil(epoch)))
        self.updates_done = step
        for name, value in logs.items():
            if isinstance(value, numbers.Real) and not is_about_the_run(name) and name not in _STEP:
                self.update_metric(name, value)
        if is_whole:
            self._set_epoch(whole + 1)


def is_about_the_run(name: str) -> bool:
    """Whether a logged number is a place or a speed, not a result.

    >>> [is_about_the_run(name) for name in ("epoch", "eval_runtime", "eval_loss")]
    [True, True, False]
    """
    return name in _PLACES or name.endswith(_SPEEDS)


def is_summary(logs: Mapping[str, Any]) -> bool:
    """Whether these are the last logs of a training, which sum it up."""
    return "train_runtime" in logs and "train_loss" in logs
